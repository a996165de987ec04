"""What a survey sees in a Keras task's batches; see `autoprec.backends.shared.batch_survey`."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np

from autoprec.backends.keras.train.batch_dimension import count_samples, slice_samples
from autoprec.backends.keras.train.data import batches, shape_of, size_in_bytes, to_numpy
from autoprec.backends.protocol import Task
from autoprec.backends.shared.batch_survey import (
    SAMPLES,
    Limits,
    Look,
    Shape,
    Survey,
    survey_batches,
    unlikeness_of,
)

_MOST_COMPARED_ELEMENTS = 2**18
"""Larger arrays are images and the like: what a loss counts is in smaller ones."""

_PARTS = ("the inputs", "the targets", "the sample weights")


class KerasBatchView:
    """See `BatchView`."""

    def __init__(self, task: Task, *, compare_halves: bool) -> None:
        self._task, self._compare_halves = task, compare_halves

    def look(self, index: int, batch: Any) -> Look:
        """Describe a batch at its place in the data."""
        samples = count_samples(self._task, batch)
        halves = self._compare_halves and samples % 2 == 0
        return Look(
            index,
            samples,
            size_in_bytes(batch),
            _shapes(batch, samples),
            _unlikeness(batch, samples) if halves else (),
        )

    def copy(self, batch: Any) -> Any:
        """Copy every array that the user could change."""
        return keras.tree.map_structure(copy_leaf, batch)


def survey(
    task: Task,
    batch_size: int,
    seed: int,
    limits: Limits,
    *,
    compare_halves: bool = False,
    workers: bool = False,
) -> Survey:
    """Look at the task's batches; see `iterate` for the `workers`."""
    return survey_batches(
        batches(task, batch_size, seed, workers=workers),
        lambda first: KerasBatchView(task, compare_halves=compare_halves),
        limits,
    )


def copy_leaf(leaf: Any) -> Any:
    """Copy what can be changed in place: NumPy's arrays and torch's tensors, not TensorFlow's."""
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    return leaf.clone() if hasattr(leaf, "clone") else leaf


def _shapes(batch: Any, samples: int) -> dict[str, Shape]:
    """Return the shapes by name, with a dimension left open where it counts samples."""
    found: dict[str, Shape] = {}
    for path, leaf in keras.tree.flatten_with_path(batch):
        shape = shape_of(leaf)
        if shape is None:
            continue
        lengths = list(shape)
        if lengths and lengths[0] == samples:
            lengths[0] = SAMPLES
        found[_name(path, batch)] = tuple(lengths)
    return found


def _name(path: tuple[Any, ...], batch: Any) -> str:
    if isinstance(batch, tuple | list) and path and path[0] in range(len(_PARTS)):
        return _PARTS[path[0]] + "".join(f"[{key!r}]" for key in path[1:])
    return "the batch" + "".join(f"[{key!r}]" for key in path)


def _unlikeness(batch: Any, samples: int) -> tuple[float, ...]:
    half = samples // 2
    with contextlib.suppress(Exception):  # what cannot be cut or compared
        halves = (
            slice_samples(batch, samples, 0, half),
            slice_samples(batch, samples, half, samples),
        )
        one, other = ([*map(_read, _small_leaves(part))] for part in halves)
        return unlikeness_of(zip(one, other, strict=True))
    return ()


def _read(leaf: Any) -> Any:
    return leaf if isinstance(leaf, np.ndarray) else to_numpy(leaf)


def _small_leaves(batch: Any) -> list[Any]:
    return [
        leaf
        for leaf in keras.tree.flatten(batch)
        if leaf is not None and np.prod(shape_of(leaf) or ()) <= _MOST_COMPARED_ELEMENTS
    ]
