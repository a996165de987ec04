"""The same batches for every run that is compared, from data that may not repeat themselves.

Batches are drawn once for each batch size and seed and kept within a budget. Beyond it they are
drawn again and compared by hash; where `build_data` gives other data the second time, the kept ones
are replayed in a cycle, and the stream says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from autoprec.backends.shared.ranks import Agree, unchanged

MAX_KEPT_BYTES = 1 << 30
"""How much data one stream keeps in memory before it draws again instead."""


class BatchOperations(Protocol):
    """What a framework does with a batch."""

    def store(self, batch: Any) -> Any:
        """Copy a batch into main memory, where nothing the user does changes it."""

    def hand_out(self, stored: Any) -> Any:
        """Copy a stored batch for one use."""

    def digest(self, stored: Any) -> str:
        """Return a hash of a batch's shapes, dtypes and values."""

    def size_in_bytes(self, stored: Any) -> int:
        """Return the bytes of all arrays in a batch."""


class BatchStream:
    """Batch 0, 1, 2, ... of one batch size and seed: always the same ones.

    `draw` begins the data anew, without end; `reproducible` says whether it gave the same batches
    each time so far. `elsewhere` returns large batches from all over the data.
    """

    def __init__(
        self,
        draw: Callable[[], Iterator[Any]],
        operations: BatchOperations,
        keep_bytes: int = MAX_KEPT_BYTES,
        elsewhere: Callable[[], Sequence[Any]] = tuple,
    ) -> None:
        self._draw_data, self._operations, self._elsewhere = draw, operations, elsewhere
        self._budget = keep_bytes
        self._kept: list[Any] = []
        self._sizes: list[int] = []
        self._pinned: dict[int, Any] = {}
        self._hashes: list[str] = []
        self._large: list[Any] | None = None
        self._live: Iterator[Any] | None = None
        self._position = 0
        self.reproducible = True
        self._start()

    def batch(self, index: int, *, pin: bool = False) -> Any:
        """Return a copy of batch `index`; `pin` keeps it whatever the budget says."""
        if index < len(self._kept):
            stored = self._kept[index]
        elif index in self._pinned:
            stored = self._pinned[index]
        else:
            stored = self._draw(index)
            if pin:
                self._pinned[index] = stored
        return self._operations.hand_out(stored)

    @property
    def kept_count(self) -> int:
        """Return how many of the first batches are kept in memory."""
        return len(self._kept)

    def kept_batches(self, count: int) -> Iterator[Any]:
        """Yield copies of the first batches, at most `count`, as far as memory holds them."""
        return (self._operations.hand_out(stored) for stored in self._kept[:count])

    def largest(self) -> Any:
        """Return a copy of the largest batch in memory, the first of several."""
        largest = max(range(len(self._sizes)), key=self._sizes.__getitem__)
        return self._operations.hand_out(self._kept[largest])

    def other_sizes(self, agree: Agree = unchanged) -> list[tuple[str, Any]]:
        """Return copies of the largest and the smallest batch known, unless the first is as large.

        Each comes with what it is called. Of several ranks all have one where any has.
        """
        if self._large is None:
            self._large = [self._operations.store(each) for each in self._elsewhere()]
        known = [*self._kept, *self._large]
        sizes = [self._operations.size_in_bytes(each) for each in known]
        found = []
        for name, choose in (("the largest batch", max), ("the smallest batch", min)):
            place = choose(range(len(sizes)), key=sizes.__getitem__)
            if agree(float(sizes[place] != sizes[0])):
                found.append((name, self._operations.hand_out(known[place])))
        return found

    def close(self) -> None:
        """End the data's iterator and its worker processes."""
        close = getattr(self._live, "close", None)
        if close is not None:
            close()
        self._live = None

    def _start(self) -> None:
        """Keep the first batch, and see whether it is the same when drawn again."""
        self._draw(0)
        self._restart()
        again = self._next()
        self._position = 1
        if self._operations.digest(again) != self._hashes[0]:
            self.reproducible = False
            self._kept[0], self._hashes[0] = again, self._operations.digest(again)

    def _draw(self, index: int) -> Any:
        if index < self._position:
            self._restart()
        while True:
            if not self.reproducible and self._budget <= 0:
                return self._kept[index % len(self._kept)]
            stored = self._next()
            self._record(stored)
            if self._position > index:
                return stored

    def _record(self, stored: Any) -> None:
        """Count a drawn batch, compare it with the last time, and keep it if there is room."""
        position, digest = self._position, self._operations.digest(stored)
        self._position += 1
        if position < len(self._hashes):
            if self._hashes[position] != digest:
                self.reproducible, self._budget = False, 0
            return
        self._hashes.append(digest)
        if position == len(self._kept) and (self._budget > 0 or not self._kept):
            self._kept.append(stored)
            self._sizes.append(self._operations.size_in_bytes(stored))
            self._budget -= self._sizes[-1]

    def _next(self) -> Any:
        if self._live is None:
            self._live = self._draw_data()
        return self._operations.store(next(self._live))

    def _restart(self) -> None:
        self.close()
        self._position = 0
