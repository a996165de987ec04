"""Loss scaling that cannot collapse unnoticed: Keras's, with a floor, a fixed mode and counts.

`keras.optimizers.LossScaleOptimizer` halves its scale without end and says nothing (tf-keras #644:
a scale stuck at 1 for a million steps). `ScaledOptimizer` stops at a floor and remembers the step
at which it got there; what it counts are variables, saved with the optimizer. Nothing here warns:
inside a compiled step no one can; `Precision.check` reads the variables and warns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from autoprec.core.recipe import LossScale
from autoprec.errors import UsageError

#: What a `ScaledOptimizer` counts, besides Keras's own scale and growth counter.
COUNTS = ("attempted", "skips", "drops", "growths", "floor_step")

#: Beyond it the scale itself would become infinite, and half of infinity is infinity.
CEILING = 2.0**126


@keras.saving.register_keras_serializable(package="autoprec")
class ScaledOptimizer(keras.optimizers.LossScaleOptimizer):  # type: ignore[misc]
    """A loss-scaling wrapper around `inner_optimizer`; it is the inner one that holds all state.

    `mode` "dynamic" doubles the scale after `dynamic_growth_steps` finite steps and halves it when
    a gradient is not finite; "fixed" keeps it. Either way a step with such a gradient is skipped.
    `floor` is the smallest scale. Its own variables are, in this order, those of Keras's wrapper,
    then counts: steps attempted and skipped, halvings and doublings of the scale, and the first
    step that reached the floor (0: none).
    """

    def __init__(
        self,
        inner_optimizer: Any,
        initial_scale: float = 2.0**15,
        dynamic_growth_steps: int = 2000,
        floor: float = 1.0,
        mode: str = "dynamic",
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(inner_optimizer, initial_scale, dynamic_growth_steps, name=name, **kwargs)
        self.floor = floor
        self.mode = mode

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

    def _counter(self, name: str) -> Any:
        return self.add_variable(shape=(), dtype="int", initializer="zeros", name=name)

    def check_finite(self, grads: Any) -> Any:
        """Whether every gradient is finite, on every replica.

        Keras asks the first replica only, before gradients are summed over them: what overflows on
        another one would reach the weights of all.
        """
        finite = super().check_finite(grads)
        if keras.config.backend() != "tensorflow":
            return finite
        import tensorflow as tf

        replica = tf.distribute.get_replica_context()
        if replica is None or replica.num_replicas_in_sync == 1:
            return finite
        broken = tf.cast(tf.logical_not(finite), tf.float32)
        return tf.equal(replica.all_reduce(tf.distribute.ReduceOp.SUM, broken), 0.0)

    def _stateful_handle_finite_grads(self, grads: Any, trainable_variables: Any) -> None:
        scale = ops.convert_to_tensor(self.dynamic_scale)
        self.attempted.assign_add(1)
        variables = trainable_variables or self._trainable_variables
        unscaled = [
            gradient
            if gradient is None or self._overwrite_variable_with_gradient(variable)
            else ops.divide(gradient, scale)
            for gradient, variable in zip(grads, variables, strict=True)
        ]
        self.inner_optimizer.apply(unscaled, trainable_variables=trainable_variables)
        if self.mode == "fixed":
            return
        due = ops.equal(self.step_counter, self.dynamic_growth_steps - 1)
        doubled = ops.minimum(ops.multiply(scale, 2.0), CEILING)
        self.dynamic_scale.assign(ops.where(due, doubled, scale))
        self.growths.assign_add(ops.cast(due, self.growths.dtype))
        count = ops.convert_to_tensor(self.step_counter)
        self.step_counter.assign(ops.where(due, ops.zeros_like(count), count + 1))

    def _stateful_handle_non_finite_grads(self) -> None:
        self.attempted.assign_add(1)
        self.skips.assign_add(1)
        if self.mode == "fixed":
            return
        self.step_counter.assign(0)
        scale = ops.convert_to_tensor(self.dynamic_scale)
        halved = ops.minimum(scale, ops.maximum(ops.multiply(scale, 0.5), self.floor))
        self.drops.assign_add(ops.cast(ops.less(halved, scale), self.drops.dtype))
        self.dynamic_scale.assign(halved)
        first = ops.logical_and(ops.less_equal(halved, self.floor), ops.equal(self.floor_step, 0))
        step = ops.convert_to_tensor(self.attempted)
        self.floor_step.assign(ops.where(first, step, ops.convert_to_tensor(self.floor_step)))

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {**super().get_config(), "floor": self.floor, "mode": self.mode}


@keras.saving.register_keras_serializable(package="autoprec")
class AccumulatingOptimizer(keras.optimizers.Optimizer):  # type: ignore[misc]
    """Averages the gradients of `steps` calls and hands them to `inner_optimizer` once.

    Keras's own `gradient_accumulation_steps` cannot be set on a built optimizer, and lets learning
    rate schedules run ahead, once per call; here the inner optimizer sees only whole updates.
    """

    def __init__(self, inner_optimizer: Any, steps: int, name: str | None = None) -> None:
        super().__init__(learning_rate=0.0, name=name)
        self.inner_optimizer = inner_optimizer
        self.steps = steps

    def build(self, var_list: Sequence[Any]) -> None:
        """Make one accumulator for each variable, and build the inner optimizer."""
        self.inner_optimizer.build(var_list)
        super().build(var_list)
        self.micro_step = self.add_variable(
            shape=(), dtype="int", initializer="zeros", name="micro_step"
        )
        self.accumulators = [
            self.add_variable_from_reference(variable, name="sum") for variable in var_list
        ]

    @property
    def variables(self) -> list[Any]:
        """Its own variables, then the inner optimizer's."""
        return [*self._variables, *self.inner_optimizer.variables]

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Add `grads` to the sums; on every `steps`-th call, update the weights."""
        if not self.built:
            with keras.name_scope(self.name):
                self.build(trainable_variables)
        variables = list(trainable_variables or self._trainable_variables)
        _refuse_replicas()
        used = [
            (self.accumulators[self._get_variable_index(variable)], gradient is not None)
            for variable, gradient in zip(variables, grads, strict=True)
        ]
        for (accumulator, _), gradient in zip(used, grads, strict=True):
            if gradient is not None:
                self.assign_add(accumulator, gradient)
        self.micro_step.assign_add(1)

        def update() -> None:
            self._update(used, variables, self.steps)

        ops.cond(ops.greater_equal(self.micro_step, self.steps), update, lambda: None)

    def flush(self) -> bool:
        """Update with what was summed since the last update; whether there was anything."""
        count = int(value_of(self.micro_step)) if self.built else 0
        if count:
            used = [(accumulator, True) for accumulator in self.accumulators]
            self._update(used, list(self._trainable_variables), count)
        return count > 0

    def _update(self, used: Any, variables: Any, count: int) -> None:
        means = [
            ops.divide(ops.convert_to_tensor(accumulator), float(count)) if given else None
            for accumulator, given in used
        ]
        self.inner_optimizer.apply(means, trainable_variables=variables)
        for accumulator, _ in used:
            accumulator.assign(ops.zeros(accumulator.shape, accumulator.dtype))
        self.micro_step.assign(0)

    @property
    def learning_rate(self) -> Any:
        """The inner optimizer's learning rate."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner_optimizer.learning_rate = value

    @property
    def iterations(self) -> Any:
        """How many updates the inner optimizer has made."""
        return self.inner_optimizer.iterations

    def finalize_variable_values(self, var_list: Any) -> None:
        """Let the inner optimizer finish (its moving averages of weights)."""
        self.inner_optimizer.finalize_variable_values(var_list)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments, the inner optimizer serialised."""
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        return {"name": self.name, "inner_optimizer": inner, "steps": self.steps}

    @classmethod
    def from_config(cls, config: Any, custom_objects: Any = None) -> AccumulatingOptimizer:
        """Build it from `get_config`'s result."""
        config = dict(config)
        inner = keras.saving.deserialize_keras_object(
            config.pop("inner_optimizer"), custom_objects=custom_objects
        )
        return cls(inner, **config)


def _refuse_replicas() -> None:
    """Stop where sums would have to be kept per replica: Keras cannot update those in a branch."""
    if keras.config.backend() != "tensorflow":
        return
    import tensorflow as tf

    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    if replicas > 1:
        raise UsageError(
            f"gradient accumulation under a strategy of {replicas} replicas was asked for, and is "
            "not supported: give every replica a larger batch, with accumulation_steps=1"
        )


def value_of(variable: Any) -> Any:
    """The value of a scalar variable, as a number of numpy's."""
    return ops.convert_to_numpy(ops.convert_to_tensor(variable))


def innermost(optimizer: Any) -> Any:
    """The user's optimizer below every wrapper."""
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer | AccumulatingOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


def find(optimizer: Any, kind: type) -> Any:
    """The wrapper of class `kind` around the user's optimizer, or None."""
    while optimizer is not None and not isinstance(optimizer, kind):
        optimizer = getattr(optimizer, "inner_optimizer", None)
    return optimizer


def wrap(optimizer: Any, scale: LossScale | None, accumulation_steps: int) -> Any:
    """Put what the recipe asks for around the user's optimizer, and take off what it does not.

    A wrapper that is already there and still wanted is kept, with its state.
    """
    inner = innermost(optimizer)
    variables = list(inner._trainable_variables) if inner.built else None
    result = inner
    if accumulation_steps > 1:
        present = find(optimizer, AccumulatingOptimizer)
        if present is None:
            present = AccumulatingOptimizer(inner, accumulation_steps)
        present.steps = accumulation_steps
        result = present
    if scale is not None:
        result = _scaled(optimizer, result, scale)
    if variables is not None and not result.built:
        result.build(variables)
        result.built = True
        _carry(optimizer, result)
    return result


def _scaled(before: Any, inner: Any, scale: LossScale) -> Any:
    present = find(before, ScaledOptimizer)
    if present is None or present.inner_optimizer is not inner:
        return ScaledOptimizer.of(inner, scale)
    present.floor, present.mode = scale.floor, scale.mode
    present.dynamic_growth_steps = scale.growth_interval
    return present


def _carry(before: Any, after: Any) -> None:
    """Take over the state of a loss scale that had already been trained with."""
    old = find(before, keras.optimizers.LossScaleOptimizer)
    new = find(after, ScaledOptimizer)
    if old is None or new is None or old is new or not old.built:
        return
    if int(value_of(old.iterations)) == 0:
        return
    new.step_counter.assign(old.step_counter)
    new.dynamic_scale.assign(old.dynamic_scale)
    for name in COUNTS:
        if hasattr(old, name):
            getattr(new, name).assign(getattr(old, name))


class CountedLoss:
    """An optimizer's `scale_loss` that counts, inside the step, losses that are not finite."""

    def __init__(self, original: Any, counter: Any) -> None:
        self.original = original
        self.counter = counter

    def __call__(self, loss: Any) -> Any:
        """Count the loss, then scale it as before."""
        broken = ops.logical_not(ops.all(ops.isfinite(loss)))
        self.counter.assign_add(ops.cast(broken, self.counter.dtype))
        return self.original(loss)
