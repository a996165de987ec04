"""Goes through data once, and ends what nobody else needs afterwards.

An iterator that only we hold ends with the pass: a generator is closed, a loader's worker processes
stop. One that the user's code holds as well (a loader that keeps its workers, a generator at module
level) is theirs: closing it would break their next use of it. Where they hand it out again when it
is at its end, what it gave before is given again, as far as a budget has kept that.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any

#: How much of one iterator's batches is kept, and of how many iterators, those used last.
_KEPT_BYTES = 64 * 2**20
_KEPT_ITERATORS = 4

_END = object()
_FRESH = [object()]


def go_through(
    data: list[Any],
    iterate: Callable[[Any], Iterator[Any]],
    size_in_bytes: Callable[[Any], int],
) -> Generator[tuple[bool, Any], None, None]:
    """Yield (False, batch) for every batch of one pass, then (True, None).

    `data` holds the data, and is emptied where they are an iterator, which has only one pass. The
    end is a value because `next` runs the user's code, in the context that the caller wants.
    """
    held = [iterate(data[0])]
    if held[0] is data[0]:
        data.clear()
    if _is_held_by_others(held):
        kept = _kept_by(held[0], size_in_bytes)
        yield from ((False, batch) for batch in kept.go_through())
        yield True, None
        return
    try:
        while (batch := next(held[0], _END)) is not _END:
            yield False, batch
        yield True, None
    finally:
        _end(held.pop())


def _is_held_by_others(held: list[Any]) -> bool:
    """Say whether anybody but this list holds its one item."""
    return sys.getrefcount(held[0]) > sys.getrefcount(_FRESH[0])


def _end(iterator: Any) -> None:
    """End the worker processes or the generator behind a data iterator."""
    for name in ("_shutdown_workers", "close"):
        end = getattr(iterator, name, None)
        if callable(end):
            with contextlib.suppress(Exception):
                end()


class _KeptIterator:
    """An iterator that the user's code may hand out again, with the batches that it gave."""

    def __init__(self, iterator: Any, size_in_bytes: Callable[[Any], int]) -> None:
        self.iterator = iterator
        self._size_in_bytes = size_in_bytes
        self._kept: list[Any] = []
        self._room = _KEPT_BYTES

    def go_through(self) -> Iterator[Any]:
        """Yield what the iterator gives; what is kept where it is at its end."""
        batch = self._next()
        if batch is _END:
            yield from tuple(self._kept)
        while batch is not _END:
            yield batch
            batch = self._next()

    def _next(self) -> Any:
        """Take a batch; keep it, one at least, while there is room for all of them so far."""
        batch = next(self.iterator, _END)
        if batch is not _END and (self._room > 0 or not self._kept):
            self._kept.append(batch)
            self._room -= max(1, self._size_in_bytes(batch))
        return batch


_KEPT: list[_KeptIterator] = []


def _kept_by(iterator: Any, size_in_bytes: Callable[[Any], int]) -> _KeptIterator:
    """Return what is kept of an iterator, and forget the one that was longest not asked for."""
    found = next((each for each in _KEPT if each.iterator is iterator), None)
    if found is None:
        found = _KeptIterator(iterator, size_in_bytes)
    else:
        _KEPT.remove(found)
    _KEPT.append(found)
    del _KEPT[:-_KEPT_ITERATORS]
    return found
