"""Which dimension of a batch counts its samples: the first, where a task does not count itself."""

from __future__ import annotations

from typing import Any

import keras

from autoprec.backends.protocol import Task
from autoprec.errors import TaskError


def count_samples(task: Task, batch: Any) -> int:
    """Count samples as the task does, else by the first array's leading dimension."""
    if task.count_samples is not None:
        return int(task.count_samples(batch))
    for leaf in keras.tree.flatten(batch):
        shape = getattr(leaf, "shape", None)
        if shape is not None and len(shape) > 0:
            return int(shape[0])
    raise TaskError(
        f"{task.name}: build_data yielded a {type(batch).__name__} without any array, expected "
        "(inputs, targets) with the samples in their first dimension"
    )


def slice_samples(batch: Any, samples: int, start: int, stop: int) -> Any:
    """Slice from `start` to `stop` every array that holds `samples` samples."""

    def cut(leaf: Any) -> Any:
        shape = getattr(leaf, "shape", None)
        if shape is None or not len(shape) or int(shape[0]) != samples:
            return leaf
        return leaf[start:stop] if hasattr(leaf, "__getitem__") else _cut_sparse(leaf, start, stop)

    return keras.tree.map_structure(cut, batch)


def _cut_sparse(tensor: Any, start: int, stop: int) -> Any:
    """Slice a `tf.SparseTensor`, which has no slices of its own."""
    import tensorflow as tf

    rest = [int(length) for length in tensor.shape[1:]]
    return tf.sparse.slice(tensor, [start] + [0] * len(rest), [stop - start, *rest])
