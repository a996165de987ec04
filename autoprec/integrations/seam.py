"""A profile inside a training loop that somebody else owns: what all trainers' files share.

Its life: the recipe is chosen, which needs no model; it is attached after the trainer has wrapped
the model; the loop runs; it is detached, and may be attached again.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from autoprec.integrations.attaching import AttachedProfile


class ForeignLoop(AttachedProfile):
    """What a trainer's loop asks for; `seen` counts the micro-batches of the update under way."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen, self._completed = 0, False
        self.scales = False

    def attach(self, *args: Any, **kwargs: Any) -> None:
        """Attach; `scales` says from then on whether losses are scaled."""
        super().attach(*args, **kwargs)
        self.scales = self.scaler.is_enabled()

    def detach(self) -> None:
        """Undo what attaching did, in the middle of an update too."""
        self.end_update()
        super().detach()

    def cast(self) -> AbstractContextManager[Any]:
        """Return autocast by the policy; empty where nothing is attached."""
        return nullcontext() if self.attached is None else self.attached.cast()

    def float32(self) -> AbstractContextManager[Any]:
        """Return a context without autocast, for a loss or metric that needs full precision."""
        return nullcontext() if self.attached is None else self.attached.float32()

    def inputs(self, batch: Any) -> Any:
        """Return a batch laid out as the recipe says."""
        return batch if self.attached is None else self.attached.inputs(batch)

    def note_loss(self, loss: Any, *, divided: bool, scaled: bool = False) -> None:
        """Note the loss of a backward pass that was just made; see `AttachedRecipe.note_loss`."""
        if self.attached is not None:
            self.attached.note_loss(loss, divided=divided, scaled=scaled)

    def complete(self, optimizer: Any) -> None:
        """End an update: make the gradients of fewer micro-batches than planned their mean."""
        from autoprec.backends.torch.apply.attached import scale_gradients

        if 0 < self.seen < self.accumulation_steps:
            scale_gradients([optimizer], self.accumulation_steps / self.seen)
        self.end_update()

    def complete_before_backward(self) -> float:
        """Do so before the last micro-batch's backward passes; return its losses' factor."""
        from autoprec.backends.torch.apply.attached import scale_gradients

        if self.attached is None or not 0 < self.seen < self.accumulation_steps:
            return 1.0
        factor = self.accumulation_steps / self.seen
        if not self._completed:
            scale_gradients(self.attached.optimizers, factor)
        self._completed = True
        return factor

    def step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Step under the loss scale, which then is updated."""
        scaler = self.scaler
        if not scaler.is_enabled():
            return optimizer.step(**kwargs)
        stepped = scaler.step(optimizer, **kwargs)
        scaler.update()
        return stepped

    def end_update(self) -> None:
        """Begin to count micro-batches anew."""
        self.seen, self._completed = 0, False
