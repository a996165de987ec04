"""A profile inside a training loop that somebody else owns: what all trainers' files share.

Its life: the recipe is chosen, which needs no model; it is attached after the trainer has wrapped
the model; the loop runs; it is detached, and may be attached again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from autoprec.backends import registry
from autoprec.backends.shared.what_ran import WhatRan
from autoprec.errors import UsageError
from autoprec.integrations.chosen import FRAMEWORK, ChosenProfile

if TYPE_CHECKING:
    from autoprec.backends.torch.apply.attached import AttachedRecipe


class ForeignLoop(ChosenProfile):
    """A profile attached to a trainer's model and optimizers.

    `part` names the module that was tuned where the trainer holds it inside another one. `seen`
    counts the micro-batches of the update that is under way. Where the script itself accumulates,
    the first update's calls of the model are compared with the profile's: `script_accumulates`.
    """

    def __init__(
        self,
        *args: Any,
        part: str | None = None,
        script_accumulates: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._part, self._script_accumulates = part, script_accumulates
        self.attached: AttachedRecipe | None = None
        self.seen, self._completed = 0, False
        self.waiting: list[Any] = []  # optimizers that are there before the model

    # The model ---------------------------------------------------------------------------------

    def attach(
        self,
        model: Any,
        optimizers: Sequence[Any] = (),
        *,
        device: str | None = None,
        holds: bool = False,
        casts_itself: bool = False,
    ) -> None:
        """Apply the recipe to the model that was tuned, inside the one that the trainer wrapped.

        A model that `casts_itself` runs under autocast where it is called; one that only `holds`
        the trained model is never called itself. What is attached to the same model already stays.
        """
        from autoprec.backends.torch.apply.roots import find_root, recipe_paths
        from autoprec.backends.torch.apply.surgeon import TorchSurgeon

        backend = registry.load(FRAMEWORK)
        chosen = self.choose(device or backend.device_of(model))
        if not chosen.applies:
            return
        recipe, paths = chosen.recipe, recipe_paths(chosen.recipe)
        root = find_root(model, paths, part=self._part, holds=holds)
        if self.attached is not None and self.attached.root is root:
            self.attached.add_optimizers(optimizers)
            return
        if holds and recipe.compile and root is find_root(model, ()):
            raise UsageError(
                f"{self.trainer}: the profile compiles the model, and {type(root).__name__} is "
                "never called itself. Name the module that was tuned, such as part='model'"
            )
        self.detach()
        self.waiting = []
        self.attached = TorchSurgeon().attach(
            recipe,
            model=root,
            whole=model,
            optimizers=optimizers,
            device=device or backend.device_of(model),
            scaler=self.scaler,
            casts_itself=casts_itself,
        )
        self.attached.compares_calls = self._script_accumulates

    def add_optimizer(self, optimizer: Any) -> None:
        """Take an optimizer that is made after, or before, the model is attached."""
        if self.attached is None:
            self.waiting.append(optimizer)
        else:
            self.attached.add_optimizers([optimizer])

    def detach(self) -> None:
        """Undo what attaching did; the scaler keeps its state."""
        attached, self.attached = self.attached, None
        self.end_update()
        if attached is not None:
            attached.restore()

    # The loop ----------------------------------------------------------------------------------

    def cast(self) -> AbstractContextManager[Any]:
        """Return autocast by the policy; empty where nothing is attached."""
        return nullcontext() if self.attached is None else self.attached.cast()

    def float32(self) -> AbstractContextManager[Any]:
        """Return a context without autocast, for a loss or metric that needs full precision."""
        return nullcontext() if self.attached is None else self.attached.float32()

    def inputs(self, batch: Any) -> Any:
        """Return a batch laid out as the recipe says."""
        return batch if self.attached is None else self.attached.inputs(batch)

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

    def end_update(self) -> None:
        """Begin to count micro-batches anew."""
        self.seen, self._completed = 0, False

    # What happened -----------------------------------------------------------------------------

    @property
    def ran(self) -> WhatRan | None:
        """Return what of the profile took part in the first update; None before its end."""
        return None if self.attached is None else self.attached.ran
