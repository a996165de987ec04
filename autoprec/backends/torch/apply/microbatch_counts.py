"""Counts the micro-batches whose gradients each optimizer holds, and remembers how to clip them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch

Clip = Callable[[Sequence[torch.optim.Optimizer]], object]
"""Clips the unscaled gradients of these optimizers' parameters."""


@contextmanager
def gradients_preserved(
    parameters: Iterable[torch.nn.Parameter], *, copied: bool
) -> Iterator[None]:
    """Preserve the gradients of these parameters over a backward pass that adds to them.

    What it adds is dropped, and not left out by `inputs=`: DistributedDataParallel waits for every
    gradient, and reentrant checkpoints give none to chosen inputs. With `copied` they are kept as
    copies: they may lie in buffers that the pass writes to.
    """
    kept = [(p, p.grad) for p in parameters]
    if copied:
        kept = [(p, None if grad is None else grad.clone()) for p, grad in kept]
    for parameter, _ in kept:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in kept:
            parameter.grad = grad


class Accumulation:
    """The micro-batches and clips that wait for a step: by optimizer, or under None without one."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._counts: dict[int, int] = {}  # by id: optimizers are no keys of their own
        self._clips: dict[int, tuple[Sequence[torch.optim.Optimizer], Clip]] = {}

    def count(self, optimizer: torch.optim.Optimizer | None) -> int:
        """Count the micro-batches whose gradients wait for this optimizer's step."""
        return self._counts.get(id(optimizer), 0)

    def largest_count(self, optimizers: Sequence[torch.optim.Optimizer]) -> int:
        """Return the largest count among these optimizers."""
        return max([self._counts.get(id(each), 0) for each in optimizers or (None,)])

    def is_complete(self, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
        """Return whether each of these optimizers has all its micro-batches."""
        counts = [self._counts.get(id(each), 0) for each in optimizers or (None,)]
        return min(counts) >= self._steps

    def add(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Count a micro-batch for each of these optimizers."""
        for each in optimizers or (None,):
            self._counts[id(each)] = self._counts.get(id(each), 0) + 1

    def clip_later(
        self, name: object, optimizers: Sequence[torch.optim.Optimizer], clip: Clip
    ) -> None:
        """Remember how to clip these if their accumulation ends early; the last call counts."""
        self._clips[id(name)] = (optimizers, clip)

    def clip_now(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Clip the gradients of these optimizers as `clip_later` was told."""
        for owners, clip in self._clips.values():
            own = [each for each in owners if any(each is one for one in optimizers)]
            if own:
                clip(own)

    def reset(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Forget the counts and clips of these optimizers."""
        for each in (*optimizers, None):
            self._counts.pop(id(each), None)
            self._clips.pop(id(each), None)

    def clear(self) -> None:
        """Forget all counts and clips."""
        self._counts.clear()
        self._clips.clear()
