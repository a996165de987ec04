"""Fetches the batches of a timing session: a few full ones, put where they are trained on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

_KEPT_BATCHES = 4
_KEPT_BYTES = 256 * 2**20


@dataclass(frozen=True)
class SessionBatches:
    """A few full batches, how many samples each has, and the loader's seconds for one."""

    batches: list[Any]
    samples: list[int]
    loader_seconds: float

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
    the first is left out. `place` puts a batch on the device. The first batch's loading, which
    starts workers and caches, is not in `loader_seconds` where there are more.
    """
    batches: list[Any] = []
    samples: list[int] = []
    seconds: list[float] = []
    held = 0
    with contextlib.closing(stream):
        for _ in range(3 * _KEPT_BATCHES):
            start = time.perf_counter()
            batch = next(stream)
            seconds.append(time.perf_counter() - start)
            if not batches:
                count = counter(batch)
            found = count(batch)
            if batches and found < samples[0]:
                continue
            batches.append(place(batch))
            samples.append(found)
            size = size_in_bytes(batch)
            held += size
            if len(batches) == _KEPT_BATCHES or held + size > _KEPT_BYTES:
                break
    later = seconds[1:] or seconds
    return SessionBatches(batches, samples, sum(later) / len(later))
