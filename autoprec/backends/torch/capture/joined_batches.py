"""Joins and cuts batches that a data set yields whole, along the dimension of their samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from autoprec.backends.torch.apply.nested_tensors import with_items
from autoprec.errors import TaskError


def samples_of(batches: Sequence[Any]) -> tuple[int | None, str]:
    """Return the samples in the first of some batches, and why batches cannot be joined and cut.

    They can where every tensor has the samples first, and is otherwise of one shape in all batches.
    """
    shapes = [list(_shapes(batch)) for batch in batches]
    first = shapes[0]
    if not first or any(shape is None or not shape for shape in first):
        return None, "yields batches that hold more than tensors with the samples first"
    known: list[tuple[int, ...]] = [shape for shape in first if shape]
    own = known[0][0]
    if any(shape[0] != own for shape in known):
        return own, "yields batches whose tensors do not all have the samples first"
    for other in shapes[1:]:
        same = len(other) == len(first) and all(
            shape is not None and shape[1:] == mine[1:]
            for shape, mine in zip(other, known, strict=True)
        )
        if not same:
            return own, "pads each batch by itself, so that no two can be joined"
    return own, ""


def _shapes(value: Any) -> Iterator[tuple[int, ...] | None]:
    """Yield the shapes in a batch: of a tensor, of a list its length; None for what is neither."""
    if isinstance(value, torch.Tensor):
        yield None if value.is_nested or value.is_sparse else tuple(value.shape)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _shapes(item)
    elif _is_list_of_others(value):
        yield (len(value),)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _shapes(item)
    elif not isinstance(value, str | int | float | None):
        yield None


def _is_list_of_others(value: Any) -> bool:
    """Say whether a list holds one text or number for each sample."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], str | int | float)


class CutBatches:
    """Batches of another size, of the same samples in the same order; the last may be short."""

    def __init__(self, batches: Iterable[Any], batch_size: int) -> None:
        self._batches, self._size = batches, batch_size

    def __iter__(self) -> Iterator[Any]:
        held: list[Any] = []
        count = 0
        for batch in self._batches:
            held.append(batch)
            count += _count(batch)
            while count >= self._size:
                whole = _joined(held)
                yield _cut(whole, slice(0, self._size))
                count -= self._size
                held = [_cut(whole, slice(self._size, None))] if count else []
        if count:
            yield _joined(held)


def _count(batch: Any) -> int:
    shape = next(_shapes(batch), None)
    if not shape:
        raise TaskError("the loader yields a batch without tensors, unlike the batches before it")
    return shape[0]


def _joined(batches: Sequence[Any]) -> Any:
    if len(batches) == 1:
        return batches[0]
    try:
        return _together(batches, _concatenated)
    except RuntimeError as error:
        raise TaskError(
            f"the loader yields batches that cannot be joined, unlike its first ones: {error}; "
            "give the loader as a function of the batch size that returns one"
        ) from error


def _concatenated(values: Sequence[Any]) -> Any:
    if isinstance(values[0], torch.Tensor):
        return torch.cat(list(values))
    return [item for value in values for item in value]


def _cut(batch: Any, span: slice) -> Any:
    return _together([batch], lambda values: values[0][span])


def _together(values: Sequence[Any], combine: Callable[[Sequence[Any]], Any]) -> Any:
    """Combine batches item by item."""
    first = values[0]
    if isinstance(first, torch.Tensor) or _is_list_of_others(first):
        return combine(values)
    if isinstance(first, Mapping):
        items = {key: _together([value[key] for value in values], combine) for key in first}
        return with_items(first, items)
    if isinstance(first, list | tuple):
        each = enumerate(zip(*values, strict=True))
        return with_items(first, {place: _together(parts, combine) for place, parts in each})
    return first
