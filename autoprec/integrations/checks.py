"""The checks of a training by a trainer, while the profile is attached and when it is not."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from autoprec.core.numerics.watching import WatchedStep
from autoprec.core.watch_settings import check_settings

if TYPE_CHECKING:
    from autoprec.backends.torch.apply.attached import AttachedRecipe
    from autoprec.backends.torch.surgeon import TorchSurgeon


class Checks:
    """Begins and ends what `watch` and `every` ask for, and keeps its state in between.

    A model that is attached again goes on where it was; another one begins anew.
    """

    def __init__(self, watch: Any, every: int) -> None:
        self._action, self._every = check_settings(watch, every), every
        self._state: Mapping[str, Any] | None = None
        self._of: weakref.ref[Any] | None = None  # whose state that is; None: of a checkpoint

    def __getstate__(self) -> dict[str, Any]:
        """Travel to another process without the model."""
        return {**vars(self), "_of": None}

    def begin(
        self, surgeon: TorchSurgeon, attached: AttachedRecipe, *, model: Any, device: str
    ) -> None:
        """Watch the training of what was just attached inside `model`."""
        if self._action is None or not attached.recipe.policy.mixed:
            return
        if self._of is not None and self._of() is not attached.root:
            self._state = None
        surgeon.watch(attached, model=model, device=device, action=self._action, every=self._every)
        if attached.watch is not None and self._state is not None:
            attached.watch.load_state_dict(self._state)

    def end(self, attached: AttachedRecipe) -> None:
        """Keep the state of what is about to be detached."""
        if attached.watch is not None:
            self._state, self._of = attached.watch.state_dict(), weakref.ref(attached.root)

    def steps(self, attached: AttachedRecipe | None) -> tuple[WatchedStep, ...]:
        """Return the checks so far."""
        if attached is not None and attached.watch is not None:
            return tuple(attached.watch.steps)
        saved = [] if self._state is None else self._state["steps"]
        return tuple(WatchedStep(**step) for step in saved)

    def state_dict(self, attached: AttachedRecipe | None) -> Mapping[str, Any] | None:
        """Return the state as plain values; None where nothing was ever watched."""
        if attached is not None and attached.watch is not None:
            return attached.watch.state_dict()
        return self._state

    def load_state_dict(
        self, state: Mapping[str, Any] | None, attached: AttachedRecipe | None
    ) -> None:
        """Go on where a training was saved, now or when its model is attached."""
        self._state, self._of = state, None
        if state is not None and attached is not None and attached.watch is not None:
            attached.watch.load_state_dict(state)
