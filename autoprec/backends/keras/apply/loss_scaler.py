"""Loss scaling that cannot collapse unnoticed: Keras's, with a floor, a fixed mode and counts.

`keras.optimizers.LossScaleOptimizer` halves its scale without end and says nothing (tf-keras #644:
a scale stuck at 1 for a million steps). `ScaledOptimizer` stops at a floor and remembers the step
at which it got there; what it counts are variables. Inside a compiled step no one can warn of that;
`Precision.check` reads the variables and does.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from autoprec.backends.keras.apply.changed_gradients import TAPES
from autoprec.backends.keras.apply.method_hooks import Hook
from autoprec.backends.keras.apply.optimizer_saving import (
    SavedAsGiven,
    SavedScalars,
    called_by_wrapper,
    innermost_optimizer,
)
from autoprec.backends.keras.apply.replicas import (
    mean_over_replicas,
    on_each_replica,
    replica_count,
)
from autoprec.backends.keras.apply.skipped_updates import STATE
from autoprec.core.recipe import (
    DEFAULT_SCALE,
    GROWTH_INTERVAL,
    LARGEST_SCALE,
    SMALLEST_SCALE,
    LossScale,
)
from autoprec.errors import AutoprecWarning

#: What a `ScaledOptimizer` counts, besides Keras's own scale and growth counter.
COUNTS = ("attempted", "skips", "drops", "growths", "floor_step")

#: Of how many updates in Python it is looked whether the script changed their gradients.
_LOOKS = 3

#: Where an optimizer holds whether the gradients of the update it makes are finite.
_FINITE = "_autoprec_finite"

#: Everything that says where a loss scale stands.
STATE_VARIABLES = ("dynamic_scale", "step_counter", *COUNTS)


@keras.saving.register_keras_serializable(package="autoprec")
class ScaledOptimizer(SavedAsGiven, keras.optimizers.LossScaleOptimizer):  # type: ignore[misc]
    """A loss-scaling wrapper around `inner_optimizer`; it is the inner one that holds all state.

    `mode` "dynamic" doubles the scale after `dynamic_growth_steps` finite steps and halves it when
    a gradient is not finite; "fixed" keeps it. Either way a step with such a gradient is skipped.
    `floor` is the smallest scale. Its own variables are, in this order, those of Keras's wrapper,
    then counts: steps attempted and skipped, halvings and doublings of the scale, and the first
    step that was skipped at the floor (0: none).
    """

    def __init__(
        self,
        inner_optimizer: Any,
        initial_scale: float = DEFAULT_SCALE,
        dynamic_growth_steps: int = GROWTH_INTERVAL,
        floor: float = 1.0,
        mode: str = "dynamic",
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        inner = innermost_optimizer(inner_optimizer)
        factor = inner.loss_scale_factor
        super().__init__(inner_optimizer, initial_scale, dynamic_growth_steps, name=name, **kwargs)
        inner.loss_scale_factor = None  # or the gradients would be unscaled twice
        self.factor = factor
        self.floor = floor
        self.mode = mode
        self._scales = self._warned = False
        self._looks = _LOOKS

    @classmethod
    def of(cls, inner_optimizer: Any, scale: LossScale) -> ScaledOptimizer:
        """Wrap `inner_optimizer` by a recipe's loss scale."""
        return cls(inner_optimizer, scale.initial, scale.growth_interval, scale.floor, scale.mode)

    def build(self, var_list: Sequence[Any]) -> None:
        """Make the variables; those of an inner optimizer that is already built stay."""
        super().build(var_list)
        self.attempted = self._counter("attempted_steps")
        self.skips = self._counter("skipped_steps")
        self.drops = self._counter("scale_drops")
        self.growths = self._counter("scale_growths")
        self.floor_step = self._counter("floor_step")
        self.saved_scale = SavedScalars([getattr(self, name) for name in STATE_VARIABLES])

    def _counter(self, name: str) -> Any:
        return self.add_variable(shape=(), dtype="int", initializer="zeros", name=name)

    def scale_loss(self, loss: Any) -> Any:
        """Scale the loss, and unscale gradients from then on; or scale a limit to gradients."""
        if isinstance(loss, int | float):
            self._looks = 0  # the script knows what it changes
            TAPES.stop(self)
            return super().scale_loss(loss)
        self._scales = True
        if self._looks and replica_count() == 1:
            TAPES.note_for(self)
        return super().scale_loss(loss)

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Unscale and update, unless a gradient is not finite; unscaled gradients stay as they are.

        A training step that never calls `scale_loss` has nothing to unscale.
        """
        if not self._scales and not self._warned:
            self._warned = True
            warnings.warn(
                f"{innermost_optimizer(self).name} is given gradients of a loss that was never "
                "scaled: small ones are zero in float16, and training may stall. In train_step or "
                "the loop, scale the loss before its gradient is taken: "
                "loss = optimizer.scale_loss(loss), or use mixed_bfloat16",
                AutoprecWarning,
                stacklevel=2,
            )
        if self._looks:
            self._looks -= 1
            self._warn_of_changes(grads, trainable_variables or self._trainable_variables)
        super().apply(grads, trainable_variables)
        STATE.end_step(self.__dict__.pop(_FINITE, None))

    def _warn_of_changes(self, grads: Any, variables: Any) -> None:
        """Warn, once, of gradients that were changed before they are unscaled."""
        if not TAPES.changed(self, grads, variables):
            return
        self._looks = 0
        warnings.warn(
            f"{innermost_optimizer(self).name} is given other gradients than the tape returned: "
            "what changed them, such as clipping, saw them multiplied by the loss scale of "
            "float16, and is as many times too strong or too weak. Let the optimizer clip "
            "(global_clipnorm=1.0, clipnorm or clipvalue), or scale what you compare them with or "
            "add to them: tf.clip_by_global_norm(gradients, optimizer.scale_loss(1.0)). Sums and "
            "means of gradients are right as they are (silence: "
            "warnings.simplefilter('ignore', AutoprecWarning))",
            AutoprecWarning,
            stacklevel=3,
        )

    def check_finite(self, grads: Any) -> Any:
        """Say whether every gradient is finite, on every replica.

        Keras asks the first replica only, before gradients are summed over them: what overflows on
        another one would reach the weights of all.
        """
        # Keras asks whether numbers are finite of real ones only.
        finite = super().check_finite([ops.abs(g) if _is_complex(g) else g for g in grads])
        if replica_count() == 1:
            self.__dict__[_FINITE] = finite
            return finite
        broken = ops.cast(ops.logical_not(finite), "float32")
        return ops.equal(mean_over_replicas(broken), 0.0)

    def _stateful_handle_finite_grads(self, grads: Any, trainable_variables: Any) -> None:
        scale = ops.convert_to_tensor(self.dynamic_scale)
        divisor = scale if self._scales else ops.ones_like(scale)
        self.attempted.assign_add(1)
        variables = trainable_variables or self._trainable_variables
        unscaled = [
            gradient
            if gradient is None or self._overwrite_variable_with_gradient(variable)
            else ops.divide(
                gradient, ops.cast(divisor, gradient.dtype) if _is_complex(gradient) else divisor
            )
            for gradient, variable in zip(grads, variables, strict=True)
        ]
        with called_by_wrapper(), STATE.paused():
            self.inner_optimizer.apply(unscaled, trainable_variables=trainable_variables)
        STATE.keep()
        if self.mode == "fixed":
            return
        due = ops.equal(self.step_counter, self.dynamic_growth_steps - 1)
        doubled = ops.minimum(ops.multiply(scale, 2.0), LARGEST_SCALE)
        self.dynamic_scale.assign(ops.where(due, doubled, scale))
        self.growths.assign_add(ops.cast(due, self.growths.dtype))
        count = ops.convert_to_tensor(self.step_counter)
        self.step_counter.assign(ops.where(due, ops.zeros_like(count), count + 1))

    def _stateful_handle_non_finite_grads(self) -> None:
        on_each_replica(STATE.put_back)
        self.attempted.assign_add(1)
        self.skips.assign_add(1)
        if self.mode == "fixed":
            return
        self.step_counter.assign(0)
        scale = ops.convert_to_tensor(self.dynamic_scale)
        halved = ops.minimum(scale, ops.maximum(ops.multiply(scale, 0.5), self.floor))
        self.drops.assign_add(ops.cast(ops.less(halved, scale), self.drops.dtype))
        first = ops.logical_and(ops.less_equal(scale, self.floor), ops.equal(self.floor_step, 0))
        self.dynamic_scale.assign(halved)
        step = ops.convert_to_tensor(self.attempted)
        self.floor_step.assign(ops.where(first, step, ops.convert_to_tensor(self.floor_step)))

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {**super().get_config(), "floor": self.floor, "mode": self.mode}


class LossCountingHook(Hook):
    """An optimizer's `scale_loss` that counts, inside the step, losses that are not finite."""

    def __init__(self, original: Any, counter: Any) -> None:
        super().__init__(original)
        self.counter = counter

    def __call__(self, loss: Any) -> Any:
        """Count the loss, then scale it as before."""
        broken = ops.logical_not(ops.all(ops.isfinite(loss)))
        self.counter.assign_add(ops.cast(broken, self.counter.dtype))
        return self.original(loss)


def _is_complex(gradient: Any) -> bool:
    return gradient is not None and "complex" in keras.backend.standardize_dtype(gradient.dtype)


def has_value(tensor: Any) -> bool:
    """Say whether a tensor has a value now, rather than when a traced function runs."""
    if keras.config.backend() != "tensorflow":
        return True
    import tensorflow as tf

    return bool(tf.executing_eagerly())


def value_of(variable: Any) -> Any:
    """Return the value of a scalar variable as a NumPy scalar."""
    return ops.convert_to_numpy(ops.convert_to_tensor(variable))


def warn_of_floor(floor: float, step: int) -> None:
    """Warn that at a step gradients were not finite, though the loss scale is at its floor."""
    lower = (
        "; if it is finite, the backward pass overflows, and a lower floor helps (loss_scale: "
        "floor in the profile)"
    )
    warnings.warn(
        f"the loss scale is at its floor of {floor:g}, and gradients were not finite at step "
        f"{step}. If the loss is not finite either, the forward pass overflows float16: keep "
        "the layers that do in float32, or use mixed_bfloat16"
        f"{lower if floor > SMALLEST_SCALE else ''} (silence: "
        "warnings.simplefilter('ignore', AutoprecWarning))",
        AutoprecWarning,
        stacklevel=3,
    )
