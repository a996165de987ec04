"""The same batches for every run that is compared, from data that may not repeat themselves.

Batches are drawn once for each batch size and seed and kept within a budget. Beyond it they are
drawn again; where `build_data` gives other data the second time, the kept ones are replayed in a
cycle, and the stream says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autoprec.backends.base import Task
from autoprec.backends.keras.data import batches, digest, size_in_bytes, to_tensors

#: How much data one stream keeps in memory before it draws again instead.
KEEP_BYTES = 1 << 30


class BatchStream:
    """Batch 0, 1, 2, ... of one batch size and seed: always the same ones."""

    def __init__(self, task: Task, batch_size: int, seed: int, keep_bytes: int = KEEP_BYTES):
        self._task, self._batch_size, self._seed = task, batch_size, seed
        self._budget = keep_bytes
        self._kept: list[Any] = []
        self._live: Iterator[Any] | None = None
        self._position = 0
        mark = digest(self._next())
        self._restart()
        first = self._next()
        self.reproducible = digest(first) == mark
        self._keep(0, first)

    def batch(self, index: int) -> Any:
        """Batch `index`, as tensors."""
        if index < len(self._kept):
            return to_tensors(self._kept[index])
        if self._budget <= 0 and not self.reproducible:
            return to_tensors(self._kept[index % len(self._kept)])
        if index < self._position:
            self._restart()
        while True:
            position, found = self._position, self._next()
            self._keep(position, found)
            if position == index:
                return to_tensors(found)

    def _keep(self, position: int, found: Any) -> None:
        if position == len(self._kept) and (self._budget > 0 or not self._kept):
            self._kept.append(found)
            self._budget -= size_in_bytes(found)

    def _next(self) -> Any:
        if self._live is None:
            self._live = batches(self._task, self._batch_size, self._seed, repeat=True)
        self._position += 1
        return next(self._live)

    def _restart(self) -> None:
        self._live, self._position = None, 0
