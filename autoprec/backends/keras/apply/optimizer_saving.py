"""Files hold what the user's own optimizer would have written, whatever wraps it.

So Keras alone loads them, with or without autoprec, and what was saved before a recipe was applied
loads after. A loss scale's own numbers are stored next to the optimizer,
where a plain one never looks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras
from keras.src.saving.keras_saveable import KerasSaveable

#: Keras's `LossScaleOptimizer` writes four numbers of its own before those of the inner optimizer:
#: iterations, learning rate, growth counter and scale.
_OWN_VARIABLES = 4
_GROWTH_COUNTER_KEY, _SCALE_KEY = "2", "3"


#: How many calls of wrapped optimizers by their wrappers are under way.
_WRAPPER_CALLS: list[None] = []


@contextlib.contextmanager
def called_by_wrapper() -> Iterator[None]:
    """Mark what is inside as an update that one of our wrappers makes."""
    _WRAPPER_CALLS.append(None)
    try:
        yield
    finally:
        _WRAPPER_CALLS.pop()


def in_wrapper() -> bool:
    """Say whether one of our wrappers is making an update."""
    return bool(_WRAPPER_CALLS)


class SavedAsGiven:
    """What a wrapper around an optimizer saves and loads: the state of the one it was given."""

    inner_optimizer: Any

    def __dir__(self) -> list[str]:
        """List the attributes Keras looks for state in: those of the user's own optimizer."""
        hidden = {"given", "optimizers"}
        if not isinstance(optimizer_as_given(self), keras.optimizers.LossScaleOptimizer):
            hidden.add("inner_optimizer")
        return [name for name in super().__dir__() if name not in hidden]

    def save_own_variables(self, store: Any) -> None:
        """Write what the user's optimizer would write, at the same places."""
        given = optimizer_as_given(self)
        if isinstance(given, keras.optimizers.LossScaleOptimizer):
            copy_scale_back(self, given)
        given.save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """Read the state of a plain optimizer, or of one in Keras's `LossScaleOptimizer`."""
        inner = innermost_optimizer(self)
        variables = inner.variables
        if len(store.keys()) != len(variables) + _OWN_VARIABLES:
            inner.load_own_variables(store)
            return
        for index, variable in enumerate(variables):
            variable.assign(store[str(index + _OWN_VARIABLES)])
        for wrapper in wrapper_chain(self):
            if isinstance(wrapper, keras.optimizers.LossScaleOptimizer) and wrapper.built:
                wrapper.step_counter.assign(store[_GROWTH_COUNTER_KEY])
                wrapper.dynamic_scale.assign(store[_SCALE_KEY])


class SavedScalars(KerasSaveable):  # type: ignore[misc]
    """A few variables with a place of their own in a file; one without that place changes none."""

    def __init__(self, variables: Sequence[Any]) -> None:
        self._numbers = list(variables)

    def _obj_type(self) -> str:
        return "Optimizer"  # how Keras is to look for what is inside: as in an optimizer

    def save_own_variables(self, store: Any) -> None:
        """Write the variables by position."""
        for index, variable in enumerate(self._numbers):
            store[str(index)] = variable.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Read them back where the file has as many."""
        if len(store.keys()) == len(self._numbers):
            for index, variable in enumerate(self._numbers):
                variable.assign(store[str(index)])


def wrapper_chain(optimizer: Any) -> Iterable[Any]:
    """Yield the optimizer and those inside it, down to the user's own.

    What stands in for one is not the user's: it says for which.
    """
    yield optimizer
    if hasattr(optimizer, "stands_for"):
        optimizer = optimizer.stands_for
        yield optimizer
    while isinstance(optimizer, keras.optimizers.LossScaleOptimizer | SavedAsGiven):
        optimizer = optimizer.inner_optimizer
        yield optimizer


def innermost_optimizer(optimizer: Any) -> Any:
    """Return the user's optimizer below every wrapper, Keras's included."""
    return list(wrapper_chain(optimizer))[-1]


def optimizer_as_given(optimizer: Any) -> Any:
    """Return what the user gave: the optimizer itself, or what our wrapper was put around."""
    if not isinstance(optimizer, SavedAsGiven):
        return optimizer
    return vars(optimizer).get("given") or innermost_optimizer(optimizer)


def copy_scale_back(wrapper: Any, given: Any) -> None:
    """Copy the trained scale back to the user's own `LossScaleOptimizer`."""
    if innermost_optimizer(wrapper).built and not given.built:
        given.build(list(innermost_optimizer(wrapper)._trainable_variables))
    for ours in wrapper_chain(wrapper):
        if isinstance(ours, keras.optimizers.LossScaleOptimizer) and ours.built:
            given.step_counter.assign(ours.step_counter)
            given.dynamic_scale.assign(ours.dynamic_scale)
            return
