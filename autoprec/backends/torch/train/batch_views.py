"""What a survey sees in a torch task's batches; see `autoprec.backends.shared.batch_survey`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

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
from autoprec.backends.torch.apply.nested_tensors import items_in, map_tensors, tensors_in
from autoprec.backends.torch.train.batch_dimension import BatchPath, Samples, find_samples
from autoprec.backends.torch.train.task_runner import batches

_MOST_COMPARED_ELEMENTS = 2**18
"""Larger tensors are images and the like: what a loss counts is in smaller ones."""


class TorchBatchView:
    """See `BatchView`."""

    def __init__(self, task: Task, samples: Samples, *, compare_halves: bool) -> None:
        self._samples, self._compare_halves = samples, compare_halves
        self._parts = (
            ("batch",) if task.training_step is not None else ("the inputs", "the targets")
        )

    def look(self, index: int, batch: Any) -> Look:
        """Describe a batch at its place in the data."""
        return Look(
            index,
            self._samples.count(batch),
            size_in_bytes(batch),
            self._shapes(batch),
            self._unlikeness(batch) if self._compare_halves else (),
        )

    def copy(self, batch: Any) -> Any:
        """Copy a batch, as far as its containers are known."""
        with contextlib.suppress(Exception):  # a class that no copy can be made of
            return map_tensors(_copy, batch)
        return batch

    def _shapes(self, batch: Any) -> dict[str, Shape]:
        """Return the shapes by name; where a list holds samples, the longest of each dimension."""
        found: dict[str, Shape] = {}
        for path, tensor in _tensors(batch, (), ()):
            shape = _shape(tensor)
            axis = self._samples.axes.get(path)
            if axis is not None and axis < len(shape):
                shape = (*shape[:axis], SAMPLES, *shape[axis + 1 :])
            name = self._name(path)
            known = found.get(name, shape)
            longest = tuple(max(pair) for pair in zip(known, shape, strict=False))
            found[name] = longest if len(known) == len(shape) else max(known, shape, key=len)
        return found

    def _name(self, path: BatchPath) -> str:
        name = self._parts[0]
        rest = path
        if len(self._parts) > 1 and path and path[0] in (0, 1):
            name, rest = self._parts[path[0]], path[1:]
        for depth, key in enumerate(rest, start=len(path) - len(rest)):
            in_samples = self._samples.axes.get(path[:depth]) is not None
            name += "[*]" if in_samples else f"[{key!r}]"
        return name

    def _unlikeness(self, batch: Any) -> tuple[float, ...]:
        if self._samples.count(batch) % 2:
            return ()
        with contextlib.suppress(Exception):  # what cannot be cut or compared
            one, other = (self._compared(half) for half in self._samples.halves(batch))
            return unlikeness_of((one[name], other[name]) for name in one if name in other)
        return ()

    def _compared(self, half: Any) -> dict[str, torch.Tensor]:
        """Return the small tensors of half a batch by name, those in a list of samples as one."""
        found: dict[str, list[torch.Tensor]] = {}
        for path, tensor in _tensors(half, (), ()):
            if tensor.numel() <= _MOST_COMPARED_ELEMENTS and not tensor.is_complex():
                found.setdefault(self._name(path), []).append(tensor.detach().reshape(-1))
        return {name: torch.cat(parts) for name, parts in found.items()}


def marks_of(batch: Any) -> list[tuple[int, int]]:
    """Return what differs once the batch was written to: to its tensors, or to what holds them."""
    found = [each for each in tensors_in(batch) if not each.is_inference()]
    return [(id(each), each._version) for each in found]


def size_in_bytes(batch: Any) -> int:
    """Return the bytes of all tensors in a batch."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(batch))


def survey(
    task: Task, batch_size: int, seed: int, limits: Limits, *, compare_halves: bool
) -> tuple[Survey, Samples]:
    """Look at the task's batches; return where they have their samples as well."""
    known: list[Samples] = []

    def view_of(first: Any) -> TorchBatchView:
        known.append(find_samples(task, first, batch_size, seed))
        return TorchBatchView(task, known[0], compare_halves=compare_halves)

    return survey_batches(batches(task, batch_size, seed), view_of, limits), known[0]


def _tensors(
    value: Any, path: BatchPath, enclosing: tuple[int, ...]
) -> Iterator[tuple[BatchPath, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif id(value) not in enclosing:
        for key, item in items_in(value):
            yield from _tensors(item, (*path, key), (*enclosing, id(value)))


def _shape(tensor: torch.Tensor) -> Shape:
    """Return a tensor's shape; of a nested one, which has none, the number of its elements."""
    return (tensor.size(0), tensor.numel()) if tensor.is_nested else tuple(tensor.shape)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor; one that repeats a row in memory stays as it is."""
    strided = tensor.layout is torch.strided and not tensor.is_nested
    if strided and 0 in tensor.stride():
        return tensor
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
