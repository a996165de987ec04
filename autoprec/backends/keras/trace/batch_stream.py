"""The same batches for every run that is compared, from data that may not repeat themselves.

Batches are drawn once for each batch size and seed and kept within a budget. Beyond it they are
drawn again and compared by hash; where `build_data` gives other data the second time, the kept ones
are replayed in a cycle, and the stream says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autoprec.backends.keras.train.data import batches, digest, size_in_bytes, to_tensors
from autoprec.backends.protocol import Task

#: How much data one stream keeps in memory before it draws again instead.
KEEP_BYTES = 1 << 30


class BatchStream:
    """Batch 0, 1, 2, ... of one batch size and seed: always the same ones."""

    def __init__(self, task: Task, batch_size: int, seed: int, keep_bytes: int = KEEP_BYTES):
        self._task, self._batch_size, self._seed = task, batch_size, seed
        self._budget = keep_bytes
        self._kept: list[Any] = []
        self._pinned: dict[int, Any] = {}
        self._hashes: list[str] = []
        self._live: Iterator[Any] | None = None
        self._position = 0
        self.reproducible = True
        self._start()

    def batch(self, index: int, *, pin: bool = False) -> Any:
        """Return batch `index` as tensors; `pin` keeps it whatever the budget says."""
        if index < len(self._kept):
            return to_tensors(self._kept[index])
        if index in self._pinned:
            return to_tensors(self._pinned[index])
        found = self._draw(index)
        if pin:
            self._pinned[index] = found
        return to_tensors(found)

    def held(self, count: int) -> Iterator[Any]:
        """Yield the first batches, at most `count`, as far as they are kept in memory."""
        return (to_tensors(batch) for batch in self._kept[:count])

    def _start(self) -> None:
        """Keep the first batch, and see whether it is the same when drawn again."""
        self._draw(0)
        self._restart()
        again = next(self._iterator())
        self._position = 1
        if digest(again) != self._hashes[0]:
            self.reproducible = False
            self._kept[:1], self._hashes[0] = [again], digest(again)

    def _draw(self, index: int) -> Any:
        if index < self._position:
            self._restart()
        while True:
            if not self.reproducible and self._budget <= 0:
                return self._kept[index % len(self._kept)]
            found = next(self._iterator())
            self._note(found)
            if self._position > index:
                return found

    def _note(self, found: Any) -> None:
        """Count a drawn batch, compare it with the last time, and keep it if there is room."""
        position, mark = self._position, digest(found)
        self._position += 1
        if position < len(self._hashes):
            if self._hashes[position] != mark:
                self.reproducible, self._budget = False, 0
            return
        self._hashes.append(mark)
        if position == len(self._kept) and (self._budget > 0 or not self._kept):
            self._kept.append(found)
            self._budget -= size_in_bytes(found)

    def _iterator(self) -> Iterator[Any]:
        if self._live is None:
            self._live = batches(self._task, self._batch_size, self._seed, repeat=True)
        return self._live

    def _restart(self) -> None:
        self._live, self._position = None, 0
