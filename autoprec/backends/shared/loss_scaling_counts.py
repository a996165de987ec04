"""What a training run counts, whichever framework counts it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StepCounts:
    """What a training run did so far: updates made and skipped, and changes of the loss scale.

    `steps` changed weights, `skipped` found gradients that were not finite. With several optimizers
    one step can be both: one optimizer stepped, another was skipped. `floor_hits` are the skips
    that would have taken the loss scale under its floor.
    """

    steps: int = 0
    skipped: int = 0
    scale_drops: int = 0
    scale_growths: int = 0
    floor_hits: int = 0

    @property
    def step_number(self) -> int:
        """Return the number, from 0, of the current optimizer step."""
        return self.steps + self.skipped
