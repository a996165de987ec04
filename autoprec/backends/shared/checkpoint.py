"""One step of the float32 run that candidates are compared with: its state, batch and answer.

As many are kept as main memory has room for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from autoprec.backends.shared.buffer_updates import StepBuffers
from autoprec.backends.shared.trace_framework import Evaluated, TraceFramework, Trainee
from autoprec.core.numerics import proof_steps

MAX_CHECKPOINT_BYTES = 8 << 30
"""How much main memory the states and gradients of a run's checkpoints may take."""


@dataclass
class Checkpoint:
    """The float32 run's state before one step, a batch, and float32's answer.

    `seed` is that of the batch's random numbers, `index` the place of the step's first batch in the
    data that float32 trains on; `noise_share` which share of that batch's gradient is noise;
    `evaluated` what `evaluated_batch` gives in evaluation (None: not looked at). `name` is that of
    a batch of another size than the first one's, empty for the step's own.
    """

    step: int
    state: Any
    batch: Any
    seed: int = 0
    index: int = 0
    loss: float | None = None
    gradient: Any = None
    later_losses: tuple[float, ...] = ()
    noise_share: float | None = None
    buffers: StepBuffers = field(default_factory=StepBuffers)
    evaluated_batch: Any = None
    evaluated: Evaluated | None = None
    name: str = ""

    def may_be_last(self, last: int) -> bool:
        """Say whether a candidate may need no more than this of a run up to the step `last`."""
        return not self.name and self.step + 1 in proof_steps.stopping_points(last + 1)

    def evaluate(self, trainee: Trainee, batch: Any) -> None:
        """Note what a batch gives in evaluation."""
        trainee.put_back(self.state)
        self.evaluated_batch = batch
        self.evaluated = trainee.evaluate_batch(batch, self.seed)

    @property
    def is_evaluated(self) -> bool:
        """Say whether float32's outputs in evaluation are known."""
        return self.evaluated is not None and bool(self.evaluated.outputs)

    def evaluation_error(
        self, trainee: Trainee, framework: TraceFramework, draw: int | None = None
    ) -> float | None:
        """Return how far a trainee's outputs in evaluation are from float32's, where it has any.

        With a `draw` its weights get that noise. None: not finite, or of another shape. What the
        task's code raises in this evaluation alone is raised here.
        """
        known = self.evaluated
        if known is None or not self.is_evaluated:
            return 0.0
        trainee.put_back(self.state)
        if draw is not None:
            trainee.add_noise(draw)
        found = trainee.evaluate_batch(self.evaluated_batch, self.seed)
        if found is None:
            return 0.0
        if found.error is not None and known.error is None:
            raise found.error
        error = framework.outputs_error(found.outputs, known.outputs)
        return error if error is not None and math.isfinite(error) else None


def affordable_steps(steps: frozenset[int], model_bytes: int) -> frozenset[int]:
    """Return the steps whose state and gradient fit into the budget: the first, then the last."""
    count = int(MAX_CHECKPOINT_BYTES // max(1, 2 * model_bytes))
    ordered = sorted(steps)
    preferred = ordered[:1] + ordered[:0:-1]
    return frozenset(preferred[: max(1, count)])
