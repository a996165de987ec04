"""A profile attached to a trainer's model and optimizers: found, applied, watched, undone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from autoprec.backends import registry
from autoprec.backends.shared.what_ran import WhatRan
from autoprec.core.numerics.watching import WatchedStep
from autoprec.core.watch_settings import EVERY, Action
from autoprec.errors import UsageError
from autoprec.integrations.checks import Checks
from autoprec.integrations.chosen import FRAMEWORK, ChosenProfile

if TYPE_CHECKING:
    from autoprec.backends.torch.apply.attached import AttachedRecipe


class AttachedProfile(ChosenProfile):
    """A profile that can be attached, detached and attached again; see `Settings`.

    Where the script itself accumulates, the first update's calls of the model are compared with
    the profile's: `script_accumulates`. A trainer that `weighs` micro-batches by what they hold may
    have unequal ones.
    """

    weighs = False

    def __init__(
        self,
        *args: Any,
        part: str | None = None,
        script_accumulates: bool = False,
        watch: Action | Literal[False] = "warn",
        watch_every: int = EVERY,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._checks = Checks(watch, watch_every)
        self._part, self._script_accumulates = part, script_accumulates
        self.attached: AttachedRecipe | None = None
        self.waiting: list[Any] = []  # optimizers that are there before the model

    def attach(
        self,
        model: Any,
        optimizers: Sequence[Any] = (),
        *,
        holds: bool = False,
        casts_itself: bool = False,
    ) -> None:
        """Apply the recipe to the model that was tuned, inside the one that the trainer wrapped.

        A model that `casts_itself` runs under autocast where it is called; one that only `holds`
        the trained model is never called itself. What is attached to the same model already stays.
        """
        from autoprec.backends.torch.apply.roots import find_root, recipe_paths
        from autoprec.backends.torch.surgeon import TorchSurgeon

        device = registry.load(FRAMEWORK).device_of(model)
        chosen = self.choose(device)
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
        surgeon = TorchSurgeon()
        self.attached = surgeon.attach(
            recipe,
            model=root,
            whole=model,
            optimizers=optimizers,
            device=device,
            scaler=self.scaler,
            casts_itself=casts_itself,
        )
        self.attached.compares_calls = self._script_accumulates
        self.attached.weighs = self.weighs
        self._checks.begin(surgeon, self.attached, model=model, device=device)

    def add_optimizer(self, optimizer: Any) -> None:
        """Take an optimizer that is made after, or before, the model is attached."""
        if self.attached is None:
            self.waiting.append(optimizer)
        else:
            self.attached.add_optimizers([optimizer])

    def detach(self) -> None:
        """Undo what attaching did; the loss scale, the counts and the checks stay."""
        attached, self.attached = self.attached, None
        if attached is not None:
            self._checks.end(attached)
            attached.restore()

    def forget(self) -> None:
        """Detach, and forget what training brought: another one begins, under the same profile."""
        self.detach()
        self._scaler = None
        self._checks.load_state_dict(None, None)

    # What happened -----------------------------------------------------------------------------

    @property
    def ran(self) -> WhatRan | None:
        """Return what of the profile took part in the first update; None before its end."""
        return None if self.attached is None else self.attached.ran

    @property
    def watched(self) -> tuple[WatchedStep, ...]:
        """Return the checks made during training so far."""
        return self._checks.steps(self.attached)

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale, the counts and the checks, as plain values."""
        checks = self._checks.state_dict(self.attached)
        return super().state_dict() | ({} if checks is None else {"watch": checks})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load such a state, or one of torch's GradScaler; an empty one changes nothing."""
        super().load_state_dict(state)
        self._checks.load_state_dict(state.get("watch"), self.attached)
