"""Whether a batch may be split: do two halves' gradients average to the whole batch's?"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import keras
import numpy as np

from autoprec.backends.keras.apply.layer_names import LayerUnit
from autoprec.backends.keras.dtypes import dtype_name, is_low
from autoprec.backends.keras.train.batch_dimension import count_samples, slice_samples
from autoprec.backends.keras.train.data import to_tensors
from autoprec.backends.keras.train.task_runner import gradient_function, state_kept
from autoprec.backends.protocol import ProgressCallback, Task
from autoprec.backends.shared.attempt import NO_MEMORY, try_to_measure
from autoprec.backends.shared.batch_splits import (
    Splitting,
    explain_difference,
    gradient_tolerance,
    in_batch,
    judge_splitting,
)
from autoprec.core.dtypes import DType


def splittable(
    task: Task,
    model: Any,
    units: Sequence[LayerUnit],
    given: Mapping[int, Any],
    report: ProgressCallback,
) -> Splitting:
    """Say whether two halves' mean gradient equals the whole batch's, dropout off; else why.

    `given` are batches from all over the data by their places, in the order they are compared in.
    A model that runs at one batch size only (state or labels of that length) is not split. The
    model's variables stay as they are.
    """
    if task.fixed_batch:
        return Splitting(False, task.fixed_batch, fixed=True)
    samples = count_samples(task, given[0])
    if samples < 2 or samples % 2:
        return Splitting(False, f"a batch of {samples} samples has no halves")
    run = gradient_function(model)
    dtypes = {v.dtype for v in model.trainable_variables} | {u.layer.compute_dtype for u in units}
    tolerance = gradient_tolerance({DType(dtype_name(each)) for each in dtypes if is_low(each)})

    fixed = False

    def reason_against(index: int) -> str:
        nonlocal fixed
        batch = to_tensors(given[index])
        reason, fixed = _reason_against(task, model, run, batch, index, tolerance)
        return in_batch(reason, index)

    with without_dropout(units):
        found = judge_splitting(given, reason_against, report, task.describing_seconds)
    return replace(found, fixed=fixed)


def _reason_against(
    task: Task, model: Any, run: Any, batch: Any, index: int, tolerance: float
) -> tuple[str, bool]:
    """Return a reason against splitting a batch, and whether no other batch size trains at all."""
    samples = count_samples(task, batch)
    if not any(tuple(leaf.shape[:1]) == (samples,) for leaf in keras.tree.flatten(batch)):
        return "no array in a batch has its samples in the first dimension", False
    half = samples // 2
    halves = [slice_samples(batch, samples, 0, half), slice_samples(batch, samples, half, samples)]
    whole, why = try_to_measure(lambda: _mean_gradient(model, run, [batch]))
    if whole is None:
        return f"two halves could not be compared with their batch: {why}", False
    split, why = try_to_measure(lambda: _mean_gradient(model, run, halves))
    if split is None:
        twice, other = try_to_measure(lambda: _mean_gradient(model, run, [_twice(batch, samples)]))
        if twice is not None or other == NO_MEMORY:
            return f"half a batch does not train ({why})", False
        only = f"half a batch does not train, so the model runs at batches of {samples} only"
        return f"{only} ({why})", True
    norm, difference = (float(np.linalg.norm(g)) for g in (whole, whole - split))
    if not index and norm == 0.0:
        return "its gradient is zero, or reaches no optimizer that the model holds", False
    if not math.isfinite(norm + difference):
        return "the gradients of a batch or of its halves are not finite", False
    if difference <= tolerance * norm:
        return "", False
    return explain_difference(difference / norm if norm else math.inf, index), False


def _twice(batch: Any, samples: int) -> Any:
    """Put a batch and itself together."""

    def repeated(leaf: Any) -> Any:
        length = tuple(getattr(leaf, "shape", ()))[:1]
        return keras.ops.concatenate([leaf, leaf]) if length == (samples,) else leaf

    return keras.tree.map_structure(repeated, batch)


def batch_of_model(task: Task) -> int | None:
    """Return the batch size that a task's model is built for; None where it has no such."""
    model, _ = try_to_measure(task.build_model)
    if not isinstance(model, keras.Model):
        return None
    layers = model._flatten_layers()
    inputs = [each for each in layers if isinstance(each, keras.layers.InputLayer)]
    sizes = {each.batch_shape[0] for each in inputs}
    return sizes.pop() if len(sizes) == 1 else None


def _mean_gradient(model: Any, run: Any, parts: Sequence[Any]) -> Any:
    """Return the mean of the parts' gradients as one vector, each part from the same state."""
    total: Any = 0.0
    for given in parts:
        with state_kept(model):
            _, gradients = run(given, 1.0)
            vectors = [_vector(np.asarray(keras.ops.convert_to_numpy(g))) for g in gradients]
        total = total + np.concatenate([np.zeros(0), *vectors]) / len(parts)
    return total


def _vector(gradient: Any) -> Any:
    parts = np.stack([gradient.real, gradient.imag]) if np.iscomplexobj(gradient) else gradient
    return parts.reshape(-1).astype(np.float64)


@contextlib.contextmanager
def without_dropout(units: Sequence[LayerUnit]) -> Iterator[None]:
    """Set every rate of dropout and noise to zero while BatchNorm stays in training mode."""
    names = ("rate", "dropout", "recurrent_dropout", "_dropout", "stddev")
    held = []
    for unit in units:
        for layer in unit.members:
            for name in names:
                value = getattr(layer, name, None)
                if isinstance(value, float) and value:
                    held.append((layer, name, value))
                    object.__setattr__(layer, name, 0.0)
    try:
        yield
    finally:
        for layer, name, value in held:
            object.__setattr__(layer, name, value)
