"""The outputs of a model's calls during a step, to be compared between two runs.

They are recorded by a hook on the model itself, or around its compiled call (a hook would be
compiled, too), so that tasks whose training_step calls it are seen as well. What is large is
sampled, every sample of the batch alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from autoprec.backends.torch.apply.model_changes import COMPILED_CALL
from autoprec.backends.torch.apply.nested_tensors import tensors_in
from autoprec.backends.torch.train.model_state import stored_values
from autoprec.core.numerics.output_scale import scale_of

MAX_ELEMENTS = 1 << 22
"""How many elements of one output are kept at most."""

_EXACT = 1e-8
"""The share of an output's square that float32's rounding stays far below."""

Parts = Sequence[Sequence[torch.Tensor]]


class RecordedOutputs:
    """The outputs of a model by the parts of a batch, in the order of its calls.

    Each is a matrix with a row for every entry of its first dimension. Of each part at most
    `most_calls` are recorded.
    """

    def __init__(self, most_calls: int | None = None) -> None:
        self.parts: list[list[torch.Tensor]] = []
        self._most_calls, self._calls = most_calls, 0

    @property
    def found(self) -> Parts:
        """Return the outputs by parts; empty where there were none."""
        return self.parts if any(self.parts) else ()

    def next_part(self) -> None:
        """Record what follows as another part."""
        self.parts.append([])
        self._calls = 0

    @contextlib.contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Record the outputs of `model` inside; of a compiled one outside of what is compiled."""
        compiled = model.__dict__.get(COMPILED_CALL)
        if compiled is not None:
            model.__dict__[COMPILED_CALL] = _RecordedCall(compiled, self._record)
            try:
                yield
            finally:
                model.__dict__[COMPILED_CALL] = compiled
            return
        handle = model.register_forward_hook(lambda module, args, given: self._record(given))
        try:
            yield
        finally:
            handle.remove()

    def _record(self, outputs: Any) -> None:
        self._calls += 1
        if self._most_calls is None or self._calls <= self._most_calls:
            self.parts[-1].extend(_matrix(each) for each in tensors_in(outputs) if _known(each))


class _RecordedCall:
    """Calls what torch.compile made of a model, and records what that returns."""

    def __init__(self, compiled: Callable[..., Any], record: Callable[[Any], None]) -> None:
        self._compiled, self._record = compiled, record

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self._compiled(*args, **kwargs)
        self._record(found)
        return found


def _known(tensor: torch.Tensor) -> bool:
    numbers = tensor.is_floating_point() or tensor.is_complex()
    return numbers and not tensor.is_nested and tensor.layout is torch.strided


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    values = stored_values(tensor.detach())
    rows = values.reshape(values.shape[0] if tensor.dim() else 1, -1)
    every = -(-rows.numel() // MAX_ELEMENTS) or 1
    return rows[:, ::every].to("cpu", torch.float32, copy=True)


def outputs_error(candidate: Parts, reference: Parts) -> float | None:
    """Return how far outputs are apart, relative to how they vary over the batch.

    Parts are put together first. Where that gives other shapes, such as of a mean over the batch,
    an output is not compared; other shapes of a whole batch are an infinite error: None.
    """
    if not any(candidate) or not any(reference):
        return 0.0
    (whole,) = reference
    split = len(candidate) > 1
    if any(len(part) != len(whole) for part in candidate):
        return 0.0 if split else None
    difference = spread = size = 0.0
    for theirs, *ours in zip(whole, *candidate, strict=True):
        if not all(each.shape[1:] == theirs.shape[1:] for each in ours):
            return 0.0 if split else None
        found = torch.cat(ours)
        if found.shape != theirs.shape:
            if split:
                continue
            return None
        known = theirs.nan_to_num(0.0, 0.0, 0.0)
        difference += _least_difference(found, ours, theirs, _EXACT * _square(known))
        spread += _square(known - known.mean(0, keepdim=True) if len(known) > 1 else known)
        size += _square(known)
    scale = scale_of(spread**0.5, size**0.5)
    if not difference < float("inf"):
        return None
    if difference == 0.0:
        return 0.0
    return float(difference**0.5 / scale) if scale else None


def _least_difference(
    found: torch.Tensor, parts: Sequence[torch.Tensor], theirs: torch.Tensor, enough: float
) -> float:
    """Return how far parts are from the whole, put together one after the other or by blocks.

    An output has several rows for every sample where several batches were put one after the other
    (two views, real and made samples), or where time comes before samples: each block is put
    together by itself. Other orders are tried until one gives `enough` or less.
    """
    least = _difference(found, theirs)
    rows = len(parts[0])
    if len(parts) == 1 or any(len(each) != rows for each in parts):
        return least
    for blocks in (count for count in range(2, rows + 1) if rows % count == 0):
        if least <= enough:
            break
        split = [each.reshape(blocks, rows // blocks, -1) for each in parts]
        least = min(least, _difference(torch.cat(split, 1).reshape(found.shape), theirs))
    return least


def _difference(found: torch.Tensor, theirs: torch.Tensor) -> float:
    same = (found == theirs) | (found.isnan() & theirs.isnan())
    return _square(torch.where(same, 0.0, found - theirs))


def _square(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
