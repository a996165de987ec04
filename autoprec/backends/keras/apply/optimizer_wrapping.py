"""Puts around an optimizer what a recipe asks for: accumulation, then a loss scale."""

from __future__ import annotations

from typing import Any

import keras

from autoprec.backends.keras.apply.accumulation import AccumulatingOptimizer
from autoprec.backends.keras.apply.loss_scaler import COUNTS, ScaledOptimizer, value_of
from autoprec.backends.keras.apply.optimizer_saving import (
    copy_scale_back,
    innermost_optimizer,
    optimizer_as_given,
    wrapper_chain,
)
from autoprec.core.recipe import LossScale


def find_wrapper(optimizer: Any, kind: type) -> Any:
    """Return the wrapper of class `kind` around the user's optimizer, or None."""
    return next((each for each in wrapper_chain(optimizer) if isinstance(each, kind)), None)


def wrap(optimizer: Any, scale: LossScale | None, accumulation_steps: int) -> Any:
    """Put what the recipe asks for around the user's optimizer, and take off what it does not.

    A wrapper that is already there and still wanted is kept, with its state.
    """
    given, inner = optimizer_as_given(optimizer), innermost_optimizer(optimizer)
    variables = list(inner._trainable_variables) if inner.built else None
    result = inner
    if accumulation_steps > 1 or (scale is None and given is not inner):
        result = _accumulation_wrapper(optimizer, accumulation_steps)
    if scale is not None:
        result = _scale_wrapper(optimizer, result, scale)
    if result is not inner:
        # Not by setattr: TensorFlow would save what it holds in its checkpoints too.
        vars(result)["given"] = given
    if variables is not None and not result.built:
        result.build(variables)
        result.built = True
        _carry_scale_state(optimizer, result)
    return result


def unwrap(optimizer: Any, back: Any) -> None:
    """Give the user's optimizer `back` the state it would have by now."""
    back = optimizer_as_given(back)
    scaled = find_wrapper(optimizer, ScaledOptimizer)
    if isinstance(back, keras.optimizers.LossScaleOptimizer):
        copy_scale_back(optimizer, back)
    elif scaled is not None:
        innermost_optimizer(back).loss_scale_factor = scaled.factor


def update_count(optimizer: Any) -> Any:
    """Return how often the user's optimizer has changed the weights, as a tensor."""
    return keras.ops.convert_to_tensor(innermost_optimizer(optimizer).iterations)


def _accumulation_wrapper(before: Any, steps: int) -> Any:
    """Return an accumulating wrapper; with one step it only replaces a loss scale in files."""
    present = find_wrapper(before, AccumulatingOptimizer)
    if present is None or (present.steps == 1) != (steps == 1):
        return AccumulatingOptimizer(innermost_optimizer(before), steps)
    present.steps = steps
    return present


def _scale_wrapper(before: Any, inner: Any, scale: LossScale) -> Any:
    present = find_wrapper(before, ScaledOptimizer)
    if present is None or present.inner_optimizer is not inner:
        return ScaledOptimizer.of(inner, scale)
    user = innermost_optimizer(inner)
    if user.loss_scale_factor is not None:
        present.factor, user.loss_scale_factor = user.loss_scale_factor, None
    present.floor, present.mode = scale.floor, scale.mode
    present.dynamic_growth_steps = scale.growth_interval
    return present


def _carry_scale_state(before: Any, after: Any) -> None:
    """Take over the state of a loss scale that had already been trained with."""
    old = find_wrapper(before, keras.optimizers.LossScaleOptimizer)
    new = find_wrapper(after, ScaledOptimizer)
    if old is None or new is None or old is new or not old.built:
        return
    if int(value_of(old.iterations)) == 0:
        return
    new.step_counter.assign(old.step_counter)
    new.dynamic_scale.assign(old.dynamic_scale)
    for name in COUNTS:
        if hasattr(old, name):
            getattr(new, name).assign(getattr(old, name))
