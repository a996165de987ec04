"""The first batch's loss and gradient, which must be numbers, and depend on the weights.

Against a float32 loss that is NaN nothing can be proven, and a training that moves no weight has
nothing to tune: both are the user's to mend, so the first number that is not finite is looked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from autoprec.backends.keras.apply.hooks import Hook, InstalledHooks
from autoprec.backends.keras.apply.layer_names import LayerUnit
from autoprec.backends.keras.train.task_runner import (
    gradient_function,
    loss_and_gradients,
    state_variables,
    to_float,
)
from autoprec.backends.protocol import Task
from autoprec.errors import TaskError


def check_first_loss(task: Task, model: Any, units: Sequence[LayerUnit], batch: Any) -> None:
    """Compute one float32 loss with its gradient; the model's variables stay as they are.

    Raises `TaskError` where the loss is inf or NaN, with where that begins, where a gradient is,
    and where none reaches the weights. A train_step that shows no gradient at all may hide it.
    """
    with _state_kept(model):
        loss, gradients = gradient_function(model)(batch, 1.0)
        value = to_float(loss)
        arrays = [keras.ops.convert_to_numpy(each) for each in gradients]
    if not math.isfinite(value):
        raise TaskError(
            f"{task.name}: the loss of the first batch is {value} in float32, so no training can "
            f"be measured or proven: {_nonfinite_origin(model, units, batch)}"
        )
    wrong = [
        variable.path
        for variable, array in zip(model.trainable_variables, arrays, strict=False)
        if not np.isfinite(array).all()
    ]
    if wrong:
        raise TaskError(
            f"{task.name}: the loss of the first batch is {value:g}, but its gradient by "
            f"{wrong[-1]} is inf or NaN in float32: every weight would be NaN after one step. A "
            "square root or a norm at 0 does this: add a small number inside it"
        )
    if arrays and not any(map(np.any, arrays)):
        raise TaskError(
            f"{task.name}: the loss of the first batch, {value:g}, moves no weight: every gradient "
            "is zero. Is it computed from what the model returned, and not behind "
            "ops.stop_gradient?"
        )


@contextmanager
def _state_kept(model: Any) -> Iterator[None]:
    before = [(variable, keras.ops.copy(variable.value)) for variable in state_variables(model)]
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)


def _nonfinite_origin(model: Any, units: Sequence[LayerUnit], batch: Any) -> str:
    """Say where inf or NaN is seen first: in the batch, in a layer, or in the loss."""
    for number_of, leaf in enumerate(keras.tree.flatten(batch)):
        values = keras.ops.convert_to_numpy(leaf)
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            wrong = ~np.isfinite(values)
            first = f", first in sample {np.argwhere(wrong)[0][0]}" if values.ndim else ""
            return (
                f"build_data yields {wrong.sum()} of {wrong.size} numbers that are inf or NaN in "
                f"array {number_of} of a batch (counted from 0, inputs first){first}. Clean the "
                "data, or leave such samples out"
            )
    layer = _first_nonfinite_layer(model, units, batch)
    if layer:
        return f"its inputs are finite, and {layer} is the first layer that returns inf or NaN"
    return (
        "the batch and every layer's outputs are finite, so the loss itself makes it (a logarithm "
        "or a square root of 0, a division by 0)"
    )


class _NonfiniteHook(Hook):
    """A layer's `call` that notes the layer if it is the first whose outputs are not finite."""

    def __init__(self, original: Any, name: str, found: list[str]) -> None:
        super().__init__(original)
        self._name, self._found = name, found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self.original(*args, **kwargs)
        if not self._found and not all(map(_is_finite, keras.tree.flatten(outputs))):
            self._found.append(self._name)
        return outputs


def _first_nonfinite_layer(model: Any, units: Sequence[LayerUnit], batch: Any) -> str:
    """Name the first layer that returns what is not finite, "" where none does."""
    found: list[str] = []
    hooks = InstalledHooks()
    for unit in units:
        name = f"{unit.path} ({unit.kind})"
        hooks.install(unit.layer, "call", _NonfiniteHook(unit.layer.call, name, found))
    try:
        with _state_kept(model):
            loss_and_gradients(model, batch)
    finally:
        hooks.restore()
    return found[0] if found else ""


def _is_finite(value: Any) -> bool:
    if not hasattr(value, "dtype") or "float" not in keras.backend.standardize_dtype(value.dtype):
        return True
    return bool(keras.ops.all(keras.ops.isfinite(value)))
