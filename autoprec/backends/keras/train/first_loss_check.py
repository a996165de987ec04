"""Checks a Keras task's first loss and gradient: `autoprec.backends.shared.first_loss_check`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from autoprec.backends.keras.apply.layer_names import LayerUnit
from autoprec.backends.keras.apply.method_hooks import Hook, InstalledHooks
from autoprec.backends.keras.train.task_runner import (
    gradient_function,
    loss_and_gradients,
    state_kept,
    to_float,
)
from autoprec.backends.protocol import Task
from autoprec.backends.shared.first_loss_check import (
    nonfinite_data,
    nonfinite_unit,
    require_trainable,
)


def check_first_loss(task: Task, model: Any, units: Sequence[LayerUnit], batch: Any) -> None:
    """Compute one float32 loss with its gradient; the model's variables stay as they are.

    Raises `TaskError` where the loss is inf or NaN, with where that begins, where a gradient is,
    and where none reaches the weights. A train_step that shows no gradient at all may hide it.
    """
    with state_kept(model):
        loss, gradients = gradient_function(model)(batch, 1.0)
        value = to_float(loss)
        arrays = [keras.ops.convert_to_numpy(each) for each in gradients]
    nonfinite = [
        variable.path
        for variable, array in zip(model.trainable_variables, arrays, strict=False)
        if not np.isfinite(array).all()
    ]
    require_trainable(
        task.name,
        value,
        nonfinite_gradients=nonfinite,
        moves_weights=not arrays or any(map(np.any, arrays)),
        origin=lambda: _nonfinite_origin(model, units, batch),
        detached="behind ops.stop_gradient",
    )


def _nonfinite_origin(model: Any, units: Sequence[LayerUnit], batch: Any) -> str:
    """Say where inf or NaN occurs first: in the batch, in a layer, or in the loss."""
    for number_of, leaf in enumerate(keras.tree.flatten(batch)):
        values = keras.ops.convert_to_numpy(leaf)
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            wrong = ~np.isfinite(values)
            where = f"array {number_of} of a batch (counted from 0, inputs first)"
            first = int(np.argwhere(wrong)[0][0]) if values.ndim else None
            return nonfinite_data(int(wrong.sum()), wrong.size, where, first)
    layer = _first_nonfinite_layer(model, units, batch)
    return nonfinite_unit("layer", layer, "the loss itself")


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
        with state_kept(model):
            loss_and_gradients(model, batch)
    finally:
        hooks.restore()
    return found[0] if found else ""


def _is_finite(value: Any) -> bool:
    if not hasattr(value, "dtype") or "float" not in keras.backend.standardize_dtype(value.dtype):
        return True
    return bool(keras.ops.all(keras.ops.isfinite(value)))
