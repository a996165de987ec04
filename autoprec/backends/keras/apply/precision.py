"""What a Keras training script holds after a recipe was applied to its model.

`fit`, a custom `train_step` and a loop all go through the optimizer that `Precision` wrapped.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Protocol

from keras import ops

from autoprec.backends.keras.apply import optimizer_saving, optimizer_wrapping, replicas
from autoprec.backends.keras.apply.accumulation import AccumulatingOptimizer
from autoprec.backends.keras.apply.change_report import ChangeReport
from autoprec.backends.keras.apply.loss_scaler import (
    STATE_VARIABLES,
    ScaledOptimizer,
    has_value,
    value_of,
    warn_of_floor,
)
from autoprec.backends.shared.loss_scaling_counts import StepCounts
from autoprec.core.dtypes import DType, Policy
from autoprec.core.numerics.watching import WatchedStep
from autoprec.core.recipe import LossScale, Recipe
from autoprec.core.recipe_words import describe_batch
from autoprec.errors import AutoprecWarning, UsageError

logger = logging.getLogger("autoprec")


@dataclass
class KerasStepCounts(StepCounts):
    """The counts of a Keras training run.

    `nonfinite_losses` are counted since the recipe was applied, wherever the loss passes through
    `scale_loss`.
    """

    nonfinite_losses: int = 0


class AppliedToModel(Protocol):
    """A recipe applied to one model, as `Precision` sees it."""

    model: Any

    @property
    def nonfinite(self) -> Any:
        """Return the counter of losses that were not finite, or None."""

    @property
    def optimizers(self) -> tuple[Any, ...]:
        """Return the user's optimizers, wrapped where the recipe needs it."""

    @property
    def report(self) -> ChangeReport:
        """Return what was changed in the model."""

    def restore(self) -> None:
        """Put the model back as it was."""


class Precision:
    """A recipe applied to models, returned by `KerasSurgeon.apply`.

    Applied to a model, it holds that one; applied before there was any, it knows every model that
    was compiled or called since, the latest first, for as long as the script itself keeps them:
    `attach_to` applies the recipe to one of those.
    """

    def __init__(
        self,
        recipe: Recipe,
        attach_to: Callable[[Precision, Any, Sequence[Any]], AppliedToModel] | None = None,
    ) -> None:
        self.recipe = recipe
        self.notes: list[str] = []
        self.watcher: Any = None  # the surgeon's, over the whole training
        self._attach_to = attach_to
        self._models: list[Callable[[], AppliedToModel | None]] = []
        self._unattached: list[Any] = []
        self._updates_before: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._undo: list[Callable[[], None]] = []
        self._warned: set[int] = set()
        self._logged = KerasStepCounts()

    def __repr__(self) -> str:
        recipe = self.recipe
        said = describe_batch(self.global_batch_size, recipe.accumulation_steps)
        if recipe.world_size > 1:
            said += f" on {recipe.world_size} replicas"
        return f"Precision({recipe.policy}, {said})"

    @property
    def policy(self) -> Policy:
        """Return the policy, which has a `compute_dtype` and a `variable_dtype`."""
        return self.recipe.policy

    @property
    def compute_dtype(self) -> DType:
        """Return the dtype matrix products run in."""
        return self.policy.compute_dtype

    @property
    def variable_dtype(self) -> DType:
        """Return the dtype weights, gradients and optimizer state are kept in."""
        return self.policy.variable_dtype

    @property
    def batch_size(self) -> int:
        """Return the samples of one step on one replica."""
        return self.recipe.batch_size

    @property
    def global_batch_size(self) -> int:
        """Return the samples of one step on all replicas, for `fit` or a dataset."""
        return self.recipe.batch_size * self.recipe.world_size

    @property
    def loss_scale(self) -> LossScale | None:
        """Return how the loss is scaled: always under float16, never otherwise."""
        return self.recipe.applied_loss_scale

    @property
    def model(self) -> Any:
        """Return the latest model that the recipe is applied to, or None while there is none."""
        return next((each.model for each in self.registered()), None)

    @property
    def optimizers(self) -> tuple[Any, ...]:
        """Return the user's optimizers in the order given, wrapped where the recipe needs it.

        Those of the latest model go first.
        """
        found: dict[int, Any] = {}
        for optimizer in (
            *(o for each in self.registered() for o in each.optimizers),
            *self._unattached,
        ):
            found.setdefault(id(optimizer_saving.innermost_optimizer(optimizer)), optimizer)
        return tuple(found.values())

    @property
    def report(self) -> ChangeReport:
        """Return what was changed, with warnings; complete for a subclassed model once it ran."""
        found = next((each.report for each in self.registered()), ChangeReport(self.policy))
        return replace(found, warnings=(*self.notes, *found.warnings))

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return what the user should know about this recipe on this model."""
        return self.report.warnings

    @property
    def optimizer(self) -> Any:
        """Return the wrapped optimizer, for `compile` and for loops."""
        if not self.optimizers:
            raise UsageError(
                "this Precision has no optimizer: give `optimizers=` or a compiled model to "
                "apply, or wrap one with `precision.wrap(optimizer)`"
            )
        return self.optimizers[0]

    def attach(self, model: Any, optimizers: Sequence[Any] = ()) -> Precision:
        """Apply the recipe to `model`, which was built after the policy was set.

        A model that is compiled or called is attached by itself; this is for one built before.
        """
        if self._attach_to is None:
            raise UsageError("this Precision already has its model")
        self.register(self._attach_to(self, model, optimizers), keep=False)
        return self

    def register(self, applied: AppliedToModel, *, keep: bool) -> None:
        """Register a model; unless `keep`, only while something else holds it."""
        self._models = [known for known in self._models if known() not in (None, applied)]
        self._models.append((lambda: applied) if keep else weakref.ref(applied))

    def registered(self) -> list[AppliedToModel]:
        """List the models that still exist, the latest first."""
        return [found for known in reversed(self._models) if (found := known()) is not None]

    def fit_to_replicas(self, model: Any) -> None:
        """Fit the recipe to the replicas of `model`, and say what that changes."""
        self.recipe, said = replicas.fit_to_replicas(self.recipe, model)
        if said is not None:
            self.notes.append(said)
            warnings.warn(said, AutoprecWarning, stacklevel=4)

    def add_undo(self, undo: Callable[[], None]) -> None:
        """Call `undo` in `restore`, before what was added earlier."""
        self._undo.append(undo)

    def know(self, optimizers: Sequence[Any]) -> None:
        """Know optimizers of no model, as they are: none is wrapped."""
        self._unattached += optimizers

    def wrap(self, optimizer: Any) -> Any:
        """Return `optimizer` with what the recipe needs around it, and remember it."""
        wrapped = self.wrapped(optimizer)
        if not any(known is wrapped for known in self.optimizers):
            self._unattached.append(wrapped)
        return wrapped

    def wrapped(self, optimizer: Any) -> Any:
        """Return `optimizer` with what the recipe needs around it; counting starts here."""
        inner = optimizer_saving.innermost_optimizer(optimizer)
        known = [o for o in self.optimizers if optimizer_saving.innermost_optimizer(o) is inner]
        steps = self.recipe.accumulation_steps
        with replicas.scope_of_optimizer(inner):
            wrapped = optimizer_wrapping.wrap((known or [optimizer])[0], self.loss_scale, steps)
        if not known:
            self._updates_before[inner] = int(value_of(optimizer_wrapping.update_count(optimizer)))
        return wrapped

    def count_from_here(self) -> None:
        """Count the updates of optimizers that are new from now on."""
        for optimizer in self.optimizers:
            inner = optimizer_saving.innermost_optimizer(optimizer)
            self._updates_before.setdefault(
                inner, int(value_of(optimizer_wrapping.update_count(inner)))
            )

    def scale_loss(self, loss: Any, optimizer: Any = None) -> Any:
        """Scale `loss` for the backward pass; call inside the tape."""
        return self._known_optimizer(optimizer).scale_loss(loss)

    def apply_gradients(self, grads_and_vars: Iterable[Any], optimizer: Any = None) -> Any:
        """Unscale, accumulate, and update unless a gradient is not finite.

        Returns whether the weights changed: a bool, or inside a tf.function a boolean tensor.
        """
        chosen = self._known_optimizer(optimizer)
        before = ops.copy(optimizer_wrapping.update_count(chosen))
        chosen.apply_gradients(list(grads_and_vars))
        changed = ops.not_equal(optimizer_wrapping.update_count(chosen), before)
        if not has_value(changed):
            return changed
        self.check()
        return bool(ops.convert_to_numpy(changed))

    def flush(self) -> bool:
        """Update with the gradients accumulated so far; return whether there were any."""
        changed = False
        for optimizer in self.optimizers:
            accumulating = optimizer_wrapping.find_wrapper(optimizer, AccumulatingOptimizer)
            if accumulating is not None:
                changed = accumulating.flush() or changed
        return changed

    @property
    def scale(self) -> float:
        """Return the current loss scale; 1 where the policy needs none."""
        scaled = next(iter(self._scaled_optimizers()), None)
        if scaled is None:
            return 1.0
        return float(value_of(scaled.dynamic_scale) if scaled.built else scaled.initial_scale)

    @property
    def steps(self) -> int:
        """Count the updates made since the recipe was applied, without the skipped ones.

        Of several optimizers it is those of the one that made most.
        """
        return max((self._steps_of(optimizer) for optimizer in self.optimizers), default=0)

    def _steps_of(self, optimizer: Any) -> int:
        start = self._updates_before.get(optimizer_saving.innermost_optimizer(optimizer), 0)
        return int(value_of(optimizer_wrapping.update_count(optimizer))) - start

    @property
    def skipped(self) -> int:
        """Count the updates skipped because a gradient was not finite, over the whole training."""
        return _sum_counts(
            [scaled for scaled in self._scaled_optimizers() if scaled.built], "skips"
        )

    @property
    def counts(self) -> KerasStepCounts:
        """Return all counts as numbers; reading them waits for the device."""
        built = [scaled for scaled in self._scaled_optimizers() if scaled.built]
        drops = _sum_counts(built, "drops")
        dynamic = _sum_counts([scaled for scaled in built if scaled.mode == "dynamic"], "skips")
        return KerasStepCounts(
            steps=self.steps,
            skipped=self.skipped,
            scale_drops=drops,
            scale_growths=_sum_counts(built, "growths"),
            floor_hits=dynamic - drops,
            nonfinite_losses=self.nonfinite_losses,
        )

    @property
    def nonfinite_losses(self) -> int:
        """Count the losses that were infinite or NaN since the recipe was applied, by replica."""
        counted = [each for each in self.registered() if each.nonfinite is not None]
        parts = (p for each in counted for p in replicas.replica_parts(each.nonfinite, each.model))
        return sum(int(value_of(part)) for part in parts)

    def check(self) -> None:
        """Log what was newly skipped; warn once of a step skipped at a loss scale's floor."""
        counts = self.counts
        if counts.skipped > self._logged.skipped:
            logger.info("%d steps skipped so far, loss scale now %g", counts.skipped, self.scale)
        if counts.nonfinite_losses > self._logged.nonfinite_losses:
            logger.info("%d losses were not finite so far", counts.nonfinite_losses)
        self._logged = counts
        for scaled in self._scaled_optimizers():
            step = int(value_of(scaled.floor_step)) if scaled.built else 0
            if step and id(scaled) not in self._warned:
                self._warned.add(id(scaled))
                warn_of_floor(scaled.floor, step)

    def watch(self, x: Any, y: Any = None, sample_weight: Any = None) -> None:
        """Check a batch of a loop of the script's own, before its step, if it is due.

        The model must be compiled with the loss. `fit` does this by itself.
        """
        if self.watcher is not None and self.model is not None:
            self.watcher.before_step(self.model, (x, y, sample_weight))

    @property
    def watched(self) -> tuple[WatchedStep, ...]:
        """Return the checks made during training so far."""
        return () if self.watcher is None else tuple(self.watcher.steps)

    def state_dict(self) -> dict[str, Any]:
        """Return the loss scales' state, which optimizers save as well, and the checks so far."""
        watch = {} if self.watcher is None else {"watch": self.watcher.state_dict()}
        return watch | {
            "loss_scales": [
                {name: value_of(getattr(s, name)).item() for name in STATE_VARIABLES}
                for s in self._scaled_optimizers()
                if s.built
            ]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take `state_dict`'s values back; a state saved without a scale changes nothing."""
        for scaled, saved in zip(self._scaled_optimizers(), state["loss_scales"], strict=False):
            if not scaled.built:
                raise UsageError(
                    "load_state_dict was called before the optimizer was built; call "
                    "optimizer.build(model.trainable_variables) first"
                )
            for name in STATE_VARIABLES:
                getattr(scaled, name).assign(saved[name])
        if self.watcher is not None and "watch" in state:
            self.watcher.load_state_dict(state["watch"], self.model)

    def restore(self) -> None:
        """Put back what was changed: policies, wrappers, the model's optimizer, global settings.

        What the script has changed itself since then stays as it is.
        """
        for applied in self.registered():
            applied.restore()
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Precision:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.restore()

    def _known_optimizer(self, optimizer: Any) -> Any:
        if optimizer is None:
            return self.optimizer
        if any(optimizer is known for known in self.optimizers):
            return optimizer
        inner = optimizer_saving.innermost_optimizer(optimizer)
        for known in self.optimizers:
            if optimizer_saving.innermost_optimizer(known) is inner:
                return known
        raise UsageError(
            f"{optimizer.name} is not an optimizer this Precision knows; give it to apply"
        )

    def _scaled_optimizers(self) -> list[Any]:
        found = (optimizer_wrapping.find_wrapper(o, ScaledOptimizer) for o in self.optimizers)
        return [scaled for scaled in found if scaled is not None]


def _sum_counts(scaled: Sequence[Any], name: str) -> int:
    return sum(int(value_of(getattr(optimizer, name))) for optimizer in scaled)
