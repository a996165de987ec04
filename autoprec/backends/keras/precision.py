"""What a Keras training script holds after a recipe was applied to its model.

`fit`, a custom `train_step` and a hand-written loop all go through the optimizer that `Precision`
wrapped; the loop also asks it for the scaled loss. Nothing here measures or chooses.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import keras
from keras import ops

from autoprec.backends.keras import loss_scale as scaling
from autoprec.backends.keras.padding import PaddedLayer
from autoprec.core.dtypes import DType, Policy
from autoprec.core.recipe import LossScale, Recipe
from autoprec.errors import AutoprecWarning, UsageError

logger = logging.getLogger("autoprec")


@dataclass(frozen=True)
class StepCounts:
    """What a training run did so far: updates made and skipped, and changes of the loss scale.

    `floor_hits` are skips that would have taken the scale under its floor; `nonfinite_losses`
    are counted since the recipe was applied, wherever the loss passes through `scale_loss`.
    """

    steps: int = 0
    skipped: int = 0
    scale_drops: int = 0
    scale_growths: int = 0
    floor_hits: int = 0
    nonfinite_losses: int = 0


@dataclass(frozen=True)
class Applied:
    """What applying a recipe changed, and what it has to say.

    `islands` are the layers computed in float32: the recipe's, then those the outputs need
    ("dense_2 (activation)" where only the end of a layer is). `kept` are float32 layers of the
    user's own in a model that was mixed before. `padded` are layers computed at aligned sizes,
    `not_padded` those that cannot be, with the reason. `warnings` each say what to do.
    """

    policy: Policy
    layers: int = 0
    islands: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    padded: tuple[PaddedLayer, ...] = ()
    not_padded: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(repr=False)
class Precision:
    """A recipe at work. Made by `KerasSurgeon.apply`.

    `optimizers` are the user's, wrapped where the recipe needs it, in the order they were given;
    `optimizer` is the first.
    """

    recipe: Recipe
    model: Any = None
    optimizers: tuple[Any, ...] = ()
    attach_to: Callable[[Precision, Any, Sequence[Any]], None] | None = None
    _report: Callable[[], Applied] | None = None
    _undo: list[Callable[[], None]] = field(default_factory=list)
    _start: int = 0
    _warned: set[int] = field(default_factory=set)
    _nonfinite: Any = None
    _logged: StepCounts = field(default_factory=StepCounts)

    def __repr__(self) -> str:
        recipe = self.recipe
        return (
            f"Precision({recipe.policy}, batch {recipe.batch_size} x {recipe.accumulation_steps})"
        )

    @property
    def policy(self) -> Policy:
        """The policy; `policy.compute_dtype` and `policy.variable_dtype` can be asked."""
        return self.recipe.policy

    @property
    def compute_dtype(self) -> DType:
        """The dtype matrix products run in."""
        return self.policy.compute_dtype

    @property
    def variable_dtype(self) -> DType:
        """The dtype weights, gradients and optimizer state are kept in."""
        return self.policy.variable_dtype

    @property
    def batch_size(self) -> int:
        """The samples of one step, to feed `fit` or a dataset with."""
        return self.recipe.batch_size

    @property
    def loss_scale(self) -> LossScale | None:
        """How the loss is scaled: always under float16, never otherwise."""
        if not self.policy.needs_loss_scale:
            return None
        return self.recipe.loss_scale or LossScale()

    @property
    def report(self) -> Applied:
        """What was changed, with the warnings; for a subclassed model, complete once it ran."""
        return self._report() if self._report is not None else Applied(self.policy)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know about this recipe on this model."""
        return self.report.warnings

    @property
    def optimizer(self) -> Any:
        """The wrapped optimizer, for `compile` and for loops."""
        if not self.optimizers:
            raise UsageError(
                "this Precision has no optimizer: give `optimizers=` or a compiled model to "
                "apply, or wrap one with `precision.wrap(optimizer)`"
            )
        return self.optimizers[0]

    def attach(self, model: Any, optimizers: Sequence[Any] = ()) -> Precision:
        """Do to `model`, built after the policy was set, what is done to one built before."""
        if self.attach_to is None:
            raise UsageError("this Precision already has its model")
        self.attach_to(self, model, optimizers)
        return self

    def wrap(self, optimizer: Any) -> Any:
        """Return `optimizer` with what the recipe needs around it, and remember it."""
        wrapped = scaling.wrap(optimizer, self.loss_scale, self.recipe.accumulation_steps)
        if not any(known is wrapped for known in self.optimizers):
            self.optimizers = (*self.optimizers, wrapped)
        return wrapped

    def scale_loss(self, loss: Any, optimizer: Any = None) -> Any:
        """Scale `loss` for the backward pass; call inside the tape."""
        return self._chosen(optimizer).scale_loss(loss)

    def apply_gradients(self, grads_and_vars: Iterable[Any], optimizer: Any = None) -> Any:
        """Unscale, accumulate, and update unless a gradient is not finite.

        Returns whether the weights changed: a bool, or inside a tf.function a boolean tensor.
        """
        chosen = self._chosen(optimizer)
        updates = scaling.innermost(chosen)._iterations
        before = ops.copy(ops.convert_to_tensor(updates))
        chosen.apply_gradients(list(grads_and_vars))
        changed = ops.not_equal(ops.convert_to_tensor(updates), before)
        if not _concrete(changed):
            return changed
        self.check()
        return bool(ops.convert_to_numpy(changed))

    def flush(self) -> bool:
        """Update with gradients accumulated since the last update; whether there were any."""
        changed = False
        for optimizer in self.optimizers:
            accumulating = scaling.find(optimizer, scaling.AccumulatingOptimizer)
            if accumulating is not None:
                changed = accumulating.flush() or changed
        return changed

    @property
    def scale(self) -> float:
        """The loss scale now; 1 where the policy needs none."""
        scaled = self._scaled()
        if scaled is None:
            return 1.0
        return (
            float(scaling.value_of(scaled.dynamic_scale))
            if scaled.built
            else float(scaled.initial_scale)
        )

    @property
    def steps(self) -> int:
        """Updates made since the recipe was applied, the skipped ones left out."""
        if not self.optimizers:
            return 0
        return int(scaling.value_of(scaling.innermost(self.optimizer)._iterations)) - self._start

    @property
    def skipped(self) -> int:
        """Updates thrown away because a gradient was not finite, over the whole training."""
        return _total([scaled for scaled in self._all_scaled() if scaled.built], "skips")

    @property
    def counts(self) -> StepCounts:
        """Everything that is counted, as numbers; reading waits for the device."""
        built = [scaled for scaled in self._all_scaled() if scaled.built]
        drops = _total(built, "drops")
        dynamic = _total([scaled for scaled in built if scaled.mode == "dynamic"], "skips")
        return StepCounts(
            steps=self.steps,
            skipped=self.skipped,
            scale_drops=drops,
            scale_growths=_total(built, "growths"),
            floor_hits=dynamic - drops,
            nonfinite_losses=self.nonfinite_losses,
        )

    @property
    def nonfinite_losses(self) -> int:
        """Losses that were infinite or NaN since the recipe was applied."""
        return 0 if self._nonfinite is None else int(scaling.value_of(self._nonfinite))

    def check(self) -> None:
        """Log what was newly skipped; warn once if a loss scale has fallen to its floor."""
        counts = self.counts
        if counts.skipped > self._logged.skipped:
            logger.info("%d steps skipped so far, loss scale now %g", counts.skipped, self.scale)
        if counts.nonfinite_losses > self._logged.nonfinite_losses:
            logger.info("%d losses were not finite so far", counts.nonfinite_losses)
        self._logged = counts
        for scaled in self._all_scaled():
            step = int(scaling.value_of(scaled.floor_step)) if scaled.built else 0
            if step and id(scaled) not in self._warned:
                self._warned.add(id(scaled))
                warnings.warn(
                    f"the loss scale reached its floor of {scaled.floor:g} at step {step}: a "
                    "gradient stays infinite or NaN at any scale, so the forward pass, not the "
                    "scale, is at fault; keep the layers that overflow in float32, or use "
                    "mixed_bfloat16 (silence: warnings.simplefilter('ignore', AutoprecWarning))",
                    AutoprecWarning,
                    stacklevel=2,
                )

    def state_dict(self) -> dict[str, Any]:
        """The loss scales' state as plain values; the optimizers save it themselves as well."""
        return {
            "loss_scales": [
                {name: scaling.value_of(getattr(s, name)).item() for name in _STATE}
                for s in self._all_scaled()
                if s.built
            ]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take `state_dict`'s values back; a state saved without a scale changes nothing."""
        for scaled, saved in zip(self._all_scaled(), state["loss_scales"], strict=False):
            if not scaled.built:
                raise UsageError(
                    "load_state_dict was called before the optimizer was built; call "
                    "optimizer.build(model.trainable_variables) first"
                )
            for name in _STATE:
                getattr(scaled, name).assign(saved[name])

    def restore(self) -> None:
        """Put back what was changed: policies, wrappers, the model's optimizer, global settings."""
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

    def _chosen(self, optimizer: Any) -> Any:
        if optimizer is None:
            return self.optimizer
        if any(optimizer is known for known in self.optimizers):
            return optimizer
        for known in self.optimizers:
            if scaling.innermost(known) is scaling.innermost(optimizer):
                return known
        raise UsageError(
            f"{optimizer.name} is not an optimizer this Precision knows; give it to apply"
        )

    def _scaled(self) -> Any:
        return next(iter(self._all_scaled()), None)

    def _all_scaled(self) -> list[Any]:
        found = (scaling.find(o, scaling.ScaledOptimizer) for o in self.optimizers)
        return [scaled for scaled in found if scaled is not None]


_STATE = ("dynamic_scale", "step_counter", *scaling.COUNTS)


def _total(scaled: Sequence[Any], name: str) -> int:
    return sum(int(scaling.value_of(getattr(optimizer, name))) for optimizer in scaled)


def _concrete(tensor: Any) -> bool:
    """Whether a tensor has a value now, rather than when a traced function runs."""
    if keras.config.backend() != "tensorflow":
        return True
    import tensorflow as tf

    return bool(tf.executing_eagerly())
