"""Which dimension of a batch counts its samples, tensor by tensor.

Most loaders put the samples first in every tensor. Recurrent layers and transformers take time
first by default, detection models take lists of images, and some tensors hold no samples at all.
Where one batch is ambiguous, a smaller one is drawn, and the dimension that follows the size
counts. Where none does, the first tensor's leading dimension counts.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from autoprec.backends.protocol import Task
from autoprec.backends.torch.apply.nested_tensors import items_in, tensors_in, with_items
from autoprec.backends.torch.train.task_runner import batches
from autoprec.errors import TaskError

BatchPath = tuple[Any, ...]
"""Where something is in a batch: the keys, indices and attributes that lead to it."""

_SMALLER_BATCH_DIVISOR = 4
"""How much smaller the second batch is: little to draw, and seldom more than the data hold."""


@dataclass(frozen=True)
class _Node:
    """A tensor's shape, or a list's length."""

    sizes: tuple[int, ...]
    is_list: bool = False


@dataclass(frozen=True)
class Samples:
    """Where a task's batches have their samples: the dimension of each tensor, 0 for a list.

    `warning` says what the user should know where no dimension follows the batch size,
    `unsplittable_reason` why a batch cannot be cut in two.
    """

    axes: Mapping[BatchPath, int] = field(default_factory=dict)
    counter: Callable[[Any], int] | None = None
    warning: str = ""
    unsplittable_reason: str = ""

    def count(self, batch: Any) -> int:
        """Return how many samples `batch` holds; `TaskError` if there is nothing to count."""
        if self.counter is not None:
            return _counted(self.counter, batch)
        for path, node in _nodes(batch):
            axis = self.axes.get(path)
            if axis is not None and axis < len(node.sizes):
                return node.sizes[axis]
        return leading(batch)

    def halves(self, batch: Any) -> tuple[Any, Any]:
        """Cut `batch` in two, where nothing says that it cannot be cut."""
        half = self.count(batch) // 2
        return _cut(batch, (), self.axes, (0, half)), _cut(batch, (), self.axes, (half, half))

    def parts(self, batch: Any, count: int) -> Sequence[Any] | None:
        """Cut `batch` into equal parts; None where it has none."""
        size, left = divmod(self.count(batch), count)
        if self.unsplittable_reason or left or not size:
            return None
        return [_cut(batch, (), self.axes, (i * size, size)) for i in range(count)]


def find_samples(task: Task, batch: Any, batch_size: int, seed: int) -> Samples:
    """Find where `batch`, which `build_data(batch_size)` gave, has its samples.

    Another batch is drawn only where this one is ambiguous: where the first tensor does not lead
    with `batch_size`, or where another dimension, or a list around it, has that length, too.
    """
    here = dict(_nodes(batch))
    if _is_unambiguous(here, batch_size):
        found = Samples({path: 0 for path, n in here.items() if n.sizes[:1] == (batch_size,)})
    else:
        found = _compare(here, task, batch_size, seed)
    if task.count_samples is not None:
        found = replace(found, counter=task.count_samples, warning="")
    if found.axes:
        return found
    count = found.count(batch)
    leading_axes = [p for p, n in here.items() if n.sizes[:1] == (count,) and not n.is_list]
    unsplittable_reason = (
        "" if leading_axes else "no tensor in a batch has a dimension that counts its samples"
    )
    return replace(
        found,
        axes=dict.fromkeys(leading_axes, 0),
        unsplittable_reason=found.unsplittable_reason or unsplittable_reason,
    )


def leading(batch: Any) -> int:
    """Return the leading dimension of the first tensor in `batch`; `TaskError` if there is none.

    A packed sequence counts its sequences, not its time steps.
    """
    for _, node in _nodes(batch):
        if node.sizes and not node.is_list:
            return node.sizes[0]
    raise TaskError(
        f"build_data: a batch of type {type(batch).__name__} without any tensor was given, "
        "expected tensors with the samples in their first dimension; for anything else define "
        "count_samples(batch) -> int"
    )


def _counted(counter: Callable[[Any], int], batch: Any) -> int:
    given = counter(batch)
    try:
        count = 0 if isinstance(given, bool) else operator.index(given)
    except TypeError:
        count = 0
    if count < 1:
        raise TaskError(f"count_samples returned {given!r}, expected a positive integer")
    return count


def _nodes(
    value: Any, path: BatchPath = (), enclosing: tuple[int, ...] = ()
) -> Iterator[tuple[BatchPath, _Node]]:
    """Yield the tensors and lists in a batch, the outer before the inner."""
    if isinstance(value, torch.Tensor):
        # A nested tensor has no shape; its first dimension it knows.
        yield path, _Node((value.size(0),) if value.is_nested else tuple(value.shape))
    elif isinstance(value, PackedSequence):
        yield path, _Node((int(value.batch_sizes[0]),))
    elif id(value) not in enclosing:
        if isinstance(value, list | tuple):
            yield path, _Node((len(value),), is_list=True)
        for key, item in items_in(value):
            yield from _nodes(item, (*path, key), (*enclosing, id(value)))


def _is_unambiguous(here: Mapping[BatchPath, _Node], batch_size: int) -> bool:
    """Return whether the first tensor leads with the batch size, and nothing else can."""
    first = next((path for path, n in here.items() if n.sizes and not n.is_list), None)
    if first is None or here[first].sizes[0] != batch_size:
        return False
    around = [here[first[:depth]] for depth in range(len(first)) if first[:depth] in here]
    later = any(batch_size in node.sizes[1:] for node in here.values())
    return not later and not any(node.sizes == (batch_size,) for node in around)


def _compare(here: Mapping[BatchPath, _Node], task: Task, batch_size: int, seed: int) -> Samples:
    """Find the dimensions that follow the requested size, by a second and smaller batch."""
    smaller = 2 if batch_size == 1 else max(1, batch_size // _SMALLER_BATCH_DIVISOR)
    there: dict[BatchPath, _Node] = {}
    stream = batches(task, smaller, seed)
    with contextlib.suppress(Exception), contextlib.closing(stream):  # it need not exist
        there = dict(_nodes(next(stream)))
    pairs = {path: (here[path].sizes, there[path].sizes) for path in here if path in there}
    exact = _dimensions_that_follow(
        pairs, lambda large, small: (large, small) == (batch_size, smaller)
    )
    # The data may hold less than requested: then the smaller batch is full, and this one is not.
    found = exact or _dimensions_that_follow(
        pairs, lambda a, b: b == smaller and smaller < a < batch_size
    )
    unexplained = [
        (a[0], b[0])
        for path, (a, b) in pairs.items()
        if a[:1] != b[:1] and not _is_inside(path, found) and not here[path].is_list
    ]
    if not unexplained:
        return Samples(found)
    large, small = unexplained[0]
    sizes = f"{large} for build_data({batch_size}), {small} for build_data({smaller})"
    unsplittable_reason = (
        f"a tensor's length changes with the batch, but not sample by sample ({sizes})"
    )
    return Samples(
        found,
        unsplittable_reason=unsplittable_reason,
        warning="" if found else _UNCLEAR_SAMPLES.format(sizes),
    )


_UNCLEAR_SAMPLES = (
    "no dimension of the batches is the requested batch size; the first tensor's leading one is "
    "counted as samples ({}). If it is something else, define count_samples(batch) -> int"
)


def _dimensions_that_follow(
    pairs: Mapping[BatchPath, tuple[tuple[int, ...], tuple[int, ...]]],
    follows: Callable[[int, int], bool],
) -> dict[BatchPath, int]:
    """Name the first dimension that follows in each tensor and list, but in nothing inside one."""
    found: dict[BatchPath, int] = {}
    for path, (large, small) in pairs.items():
        axes = [
            axis
            for axis, lengths in enumerate(zip(large, small, strict=False))
            if follows(*lengths)
        ]
        if axes and not _is_inside(path, found):
            found[path] = axes[0]
    return found


def _is_inside(path: BatchPath, found: Mapping[BatchPath, int]) -> bool:
    """Return whether `path`, or a container around it, has samples of its own."""
    return any(path[:depth] in found for depth in range(len(path) + 1))


def _cut(value: Any, path: BatchPath, axes: Mapping[BatchPath, int], span: tuple[int, int]) -> Any:
    """Cut `span` (start, length) out of everything in `value` that holds samples."""
    axis = axes.get(path)
    if isinstance(value, torch.Tensor):
        return value if axis is None else _narrow(value, axis, *span)
    if isinstance(value, PackedSequence):
        return value if axis is None else _unpack_part(value, *span)
    if axis is not None and isinstance(value, list | tuple):
        return type(value)(value[span[0] : sum(span)])
    if next(tensors_in(value), None) is None and not any(p[: len(path)] == path for p in axes):
        return value
    items = {key: _cut(item, (*path, key), axes, span) for key, item in items_in(value)}
    return with_items(value, items)


def _narrow(tensor: torch.Tensor, axis: int, start: int, length: int) -> torch.Tensor:
    if not tensor.is_nested:
        part = tensor.detach().narrow(axis, start, length)
        return part.requires_grad_(tensor.requires_grad)
    parts = list(tensor.detach().unbind())[start : start + length]
    return torch.nested.as_nested_tensor(parts, layout=tensor.layout)


def _unpack_part(sequence: PackedSequence, start: int, length: int) -> PackedSequence:
    padded, lengths = pad_packed_sequence(sequence, batch_first=True)
    span = slice(start, start + length)
    return pack_padded_sequence(padded[span], lengths[span], True, enforce_sorted=False)
