"""Makes an iterator, which can be gone through once, a list that grows as it is read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MOST_ITEMS = 512
"""After so many batches the data end: all that were given are kept."""


class RecordedBatches:
    """The batches of an iterator; each pass begins with the first one."""

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self._given: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        place = 0
        while place < MOST_ITEMS:
            if place == len(self._given):
                try:
                    self._given.append(next(self._iterator))
                except StopIteration:
                    return
            yield self._given[place]
            place += 1
