"""The recipe that a profile gives for a trainer's device, before there is a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autoprec.applying import ChosenRecipe, choose_recipe
from autoprec.backends import registry
from autoprec.backends.shared.loss_scaling_counts import StepCounts
from autoprec.core.dtypes import Policy
from autoprec.core.profile import Profile
from autoprec.core.recipe import Recipe
from autoprec.integrations.refusals import refuse

if TYPE_CHECKING:
    from autoprec.backends.torch.apply.loss_scaler import LossScaler


FRAMEWORK = "torch"
"""Whose trainers these are."""


class ChosenProfile:
    """A profile and the recipe it gives; `strict` and `fallback` are `apply_profile`'s.

    `trainer` is for messages.
    """

    def __init__(
        self,
        trainer: str,
        profile: str | Path | Profile | Recipe | None,
        *,
        strict: bool = False,
        fallback: Literal["measured", "rules"] = "measured",
    ) -> None:
        self.trainer, self._profile = trainer, profile
        self._strict, self._fallback = strict, fallback
        self._device: str | None = None
        self._chosen: ChosenRecipe | None = None
        self._scaler: LossScaler | None = None

    def choose(self, device: str | None = None) -> ChosenRecipe:
        """Choose the recipe for `device`, once for each kind of device; None: where models are."""
        kind = None if device is None else device.partition(":")[0]
        if self._chosen is None or (kind is not None and kind != self._device):
            backend = registry.load(FRAMEWORK)
            address = device or backend.device_of(None)
            self._device = address.partition(":")[0]
            self._chosen = choose_recipe(
                self._profile, address, backend, strict=self._strict, fallback=self._fallback
            )
            self._scaler = None
        return self._chosen

    def keep_batch(self, batch_size: int, accumulation_steps: int) -> None:
        """Take the batch from the trainer, and everything else from the profile."""
        chosen = self.choose()
        recipe = replace(
            chosen.recipe, batch_size=batch_size, accumulation_steps=accumulation_steps
        )
        self._chosen = replace(chosen, recipe=recipe)

    @property
    def recipe(self) -> Recipe:
        """Return the recipe; float32's at the profile's batch where profiles are switched off."""
        return self.choose().recipe

    @property
    def policy(self) -> Policy:
        """Return the recipe's policy."""
        return self.recipe.policy

    @property
    def batch_size(self) -> int:
        """Return the samples of one micro-batch on one device: what the loader should yield."""
        return self.recipe.batch_size

    @property
    def accumulation_steps(self) -> int:
        """Return the micro-batches of one update."""
        return self.recipe.accumulation_steps

    @property
    def scaler(self) -> LossScaler:
        """Return the loss scaler, which exists before the model; disabled where none is needed."""
        if self._scaler is None:
            from autoprec.backends.torch.apply.attached import new_scaler

            self.choose()
            self._scaler = new_scaler(self.recipe, str(self._device))
        return self._scaler

    def require(self, facts: Mapping[str, Any]) -> None:
        """Raise `UsageError` where trainer and profile cannot be together; see the table."""
        if self.choose().applies:
            refuse(self.trainer, self.recipe, facts)

    @property
    def steps(self) -> int:
        """Return the number of optimizer steps that changed weights."""
        return self.scaler.counts.steps

    @property
    def skipped(self) -> int:
        """Return the number of optimizer steps skipped because gradients were not finite."""
        return self.scaler.counts.skipped

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scale and the counts as plain values; `Precision` loads them, too."""
        counts = asdict(self.scaler.counts)
        return {"scaler": self.scaler.state_dict(), "counts": counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load such a state, or one of torch's GradScaler; an empty one changes nothing."""
        self.scaler.load_state_dict(state.get("scaler", state))
        known = {field.name for field in fields(StepCounts)}
        counts = {k: int(v) for k, v in state.get("counts", {}).items() if k in known}
        self.scaler.counts = StepCounts(**counts)
