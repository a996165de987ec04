"""Fetches the batches of a timing session: a few full ones, put where they are trained on.

Where all batches have the same shape the first ones do. Where they differ, a few are timed in turn
that stand for all, and before that a step is taken with the largest, for the memory.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import Any

from autoprec.backends.shared.batch_survey import TIMED, TIMED_AGAIN, Limits, Survey
from autoprec.backends.shared.loader_timing import is_settled, seconds_per_batch
from autoprec.backends.shared.ranks import Agree, unchanged

_KEPT_BATCHES = 4
_KEPT_BYTES = 256 * 2**20


@dataclass(frozen=True)
class SessionBatches:
    """A few full batches, how many samples each has, and the loader's seconds for one.

    `largest` are to be trained on once, before anything is timed. `mixed` says that the batches are
    not alike, so that only the time of a whole round of them is one of many like it.
    """

    batches: list[Any]
    samples: list[int]
    loader_seconds: float
    largest: list[Any] = field(default_factory=list)
    mixed: bool = False

    @property
    def round_length(self) -> int:
        """Return how many batches are timed as one."""
        return len(self.batches) if self.mixed else 1

    @property
    def mean_samples(self) -> float:
        """Return the mean samples of a batch."""
        return sum(self.samples) / len(self.samples)


def fetch_batches(
    stream: Generator[Any, None, None],
    *,
    counter: Callable[[Any], Callable[[Any], int]],
    place: Callable[[Any], Any],
    size_in_bytes: Callable[[Any], int],
) -> SessionBatches:
    """Take full batches from `stream`, which is closed afterwards, as far as memory may hold them.

    `counter` gives, for the first batch, what counts the samples of any; a batch with fewer than
    the first is left out. `place` puts a batch on the device. Further batches are drawn until the
    loader's pace is known; the first one's loading, which starts workers and caches, is no part of
    it.
    """
    batches: list[Any] = []
    samples: list[int] = []
    arrivals: list[float] = []
    held, enough = 0, False
    start = time.perf_counter()
    with contextlib.closing(stream):
        while not enough or not is_settled(arrivals, arrivals[0] - start):
            batch = next(stream)
            arrivals.append(time.perf_counter())
            if enough:
                continue
            if not batches:
                count = counter(batch)
            found = count(batch)
            if not batches or found >= samples[0]:
                batches.append(batch)
                samples.append(found)
                size = size_in_bytes(batch)
                held += size
                enough = len(batches) == _KEPT_BATCHES or held + size > _KEPT_BYTES
            enough = enough or len(arrivals) == 3 * _KEPT_BATCHES
    for index, batch in enumerate(batches):
        batches[index] = place(batch)  # not before, for workers load meanwhile
    return SessionBatches(batches, samples, seconds_per_batch(arrivals))


def fetch_representative_batches(
    open_stream: Callable[[bool], Generator[Any, None, None]],
    *,
    look: Callable[[Limits], Survey],
    surveyed: int | None,
    counter: Callable[[Any], Callable[[Any], int]],
    place: Callable[[Any], Any],
    size_in_bytes: Callable[[Any], int],
    agree: Agree = unchanged,
) -> SessionBatches:
    """Take batches that stand for all the data, or the first ones where all have the same shape.

    `look` surveys the data. `surveyed` is how many batches it looks at: 0 where the shapes are
    known to be the same, None where nothing is known. Several ranks find as many batches each.
    """
    seen: Survey | None = None
    if surveyed != 0:
        seen = look(TIMED if surveyed is None else replace(TIMED_AGAIN, batches=surveyed))
        if not agree(float(seen.varies)):
            seen = None
    if seen is None:
        return fetch_batches(
            open_stream(True), counter=counter, place=place, size_in_bytes=size_in_bytes
        )
    chosen = _cycled(seen.mixture(_KEPT_BATCHES, _KEPT_BYTES), agree)
    return SessionBatches(
        [place(seen.kept[index]) for index in chosen],
        [seen.looks[index].samples for index in chosen],
        seen.loader_seconds,
        [seen.kept[index] for index in _cycled(seen.largest(), agree)],
        mixed=True,
    )


def _cycled(indices: list[int], agree: Agree) -> list[int]:
    """Return as many indices as the rank with the most has, by repeating them."""
    return list(itertools.islice(itertools.cycle(indices), int(agree(len(indices)))))
