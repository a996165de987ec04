"""Gradient accumulation around an optimizer that may be built already, under any loss scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from autoprec.backends.keras.apply.loss_scaler import value_of
from autoprec.backends.keras.apply.method_hooks import Hook
from autoprec.backends.keras.apply.optimizer_saving import SavedAsGiven, called_by_wrapper
from autoprec.backends.keras.apply.replicas import act_now, act_where


@keras.saving.register_keras_serializable(package="autoprec")
class AccumulatingOptimizer(SavedAsGiven, keras.optimizers.Optimizer):  # type: ignore[misc]
    """Averages the gradients of `steps` calls and hands them to `inner_optimizer` once.

    Keras's own `gradient_accumulation_steps` cannot be set on a built optimizer, and lets learning
    rate schedules run ahead, once per call; here the inner optimizer sees only whole updates. Every
    replica keeps sums of its own, so that gradients are reduced once for each update.
    """

    def __init__(self, inner_optimizer: Any, steps: int, name: str | None = None) -> None:
        super().__init__(learning_rate=0.0, name=name)
        self.inner_optimizer = inner_optimizer
        self.steps = steps

    def build(self, var_list: Sequence[Any]) -> None:
        """Make one accumulator for each variable, and build the inner optimizer."""
        self.inner_optimizer.build(var_list)
        super().build(var_list)
        if self.steps == 1:
            return
        self.micro_step = self.add_variable(
            shape=(), dtype="int", initializer="zeros", name="micro_step"
        )
        self.accumulators = [
            self.add_variable_from_reference(variable, name="sum") for variable in var_list
        ]

    @property
    def optimizers(self) -> list[Any]:
        """Return the user's optimizer: Keras's callbacks look here for averaged weights."""
        return list(getattr(self.inner_optimizer, "optimizers", [self.inner_optimizer]))

    @property
    def variables(self) -> list[Any]:
        """Return its own variables, then the inner optimizer's."""
        return [*self._variables, *self.inner_optimizer.variables]

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Add `grads` to the sums; on every `steps`-th call, update the weights."""
        if not self.built:
            with keras.name_scope(self.name):
                self.build(trainable_variables)
        if self.steps == 1:
            with called_by_wrapper():
                self.inner_optimizer.apply(grads, trainable_variables)
            return
        variables = list(trainable_variables or self._trainable_variables)
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

        act_where(lambda: ops.greater_equal(self.micro_step, self.steps), update)

    def flush(self) -> bool:
        """Update with what was summed since the last update; return whether there was anything."""
        count = int(value_of(self.micro_step)) if self.built and self.steps > 1 else 0
        if count:
            used = [(accumulator, True) for accumulator in self.accumulators]
            variables = list(self._trainable_variables)
            act_now(self, lambda: self._update(used, variables, count))
        return count > 0

    def _update(self, used: Any, variables: Any, count: int) -> None:
        means = [
            ops.divide(ops.convert_to_tensor(accumulator), float(count)) if given else None
            for accumulator, given in used
        ]
        with called_by_wrapper():
            self.inner_optimizer.apply(means, trainable_variables=variables)
        for accumulator, _ in used:
            accumulator.assign(ops.zeros(accumulator.shape, accumulator.dtype))
        self.micro_step.assign(0)

    def scale_loss(self, loss: Any) -> Any:
        """Scale the loss as the inner optimizer does, which is who unscales."""
        return self.inner_optimizer.scale_loss(loss)

    @property
    def learning_rate(self) -> Any:
        """Return the inner optimizer's learning rate."""
        return self.inner_optimizer.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: Any) -> None:
        self.inner_optimizer.learning_rate = value

    @property
    def iterations(self) -> Any:
        """Return the number of updates that the inner optimizer has made."""
        return self.inner_optimizer.iterations

    def finalize_variable_values(self, var_list: Any) -> None:
        """Update with what is left, and let the inner optimizer finish (its moving averages)."""
        self.flush()
        self.inner_optimizer.finalize_variable_values(var_list)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments, the inner optimizer serialised."""
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


class FinalizeHook(Hook):
    """The compiled optimizer's `finalize_variable_values`, by which Keras ends `fit`."""

    def __init__(
        self, original: Callable[..., Any], others: Sequence[AccumulatingOptimizer]
    ) -> None:
        super().__init__(original)
        self.others = others

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Let the model's other optimizers update with what is left too."""
        for optimizer in self.others:
            optimizer.flush()
        return self.original(*args, **kwargs)
