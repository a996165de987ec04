"""A loader's pace is that of all its workers, whatever comes in the first burst."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

import pytest

from autoprec.backends.shared.loader_timing import (
    arrivals_after,
    is_settled,
    seconds_per_batch,
)


def arrivals(seconds: float, workers: int, *, start: float = 0.1) -> Iterator[float]:
    """Yield when batches come, in order, from workers that take so long for one and never wait."""
    free = [start] * workers
    heapq.heapify(free)
    came = 0.0
    while True:
        done = heapq.heappop(free) + seconds
        heapq.heappush(free, done)
        came = max(came, done) + 2e-5
        yield came


def timed(stream: Iterator[float], *, least: int = 4) -> tuple[float, int]:
    """Return the seconds for a batch, and how many batches were drawn to know them."""
    seen = list(itertools.islice(stream, least))
    while not is_settled(seen, seen[0]):
        seen.append(next(stream))
    return seconds_per_batch(seen), len(seen)


@pytest.mark.parametrize("workers", [1, 2, 4, 6, 16])
@pytest.mark.parametrize("seconds", [0.01, 0.05, 0.4])
def test_the_pace_is_that_of_all_workers(workers: int, seconds: float) -> None:
    found, _ = timed(arrivals(seconds, workers))
    assert found == pytest.approx(seconds / workers, rel=0.05)


def test_four_workers_of_50_ms_a_batch_feed_one_every_12_5_ms() -> None:
    assert timed(arrivals(0.05, 4))[0] == pytest.approx(0.0125, rel=0.01)


def test_a_loader_without_workers_is_timed_over_a_few_batches() -> None:
    found, drawn = timed(arrivals(0.05, 1, start=0.02))
    assert drawn == 5
    assert found == pytest.approx(0.05, rel=0.01)


def test_workers_that_start_one_after_another_are_timed_once_all_have_started() -> None:
    """Eight of them, 20 ms apart: the first batches come 20 ms apart, and then 6."""
    times = [0.05 + 0.02 * worker for worker in range(8)]
    stream = heapq.merge(*(itertools.count(begun, 0.05) for begun in times))
    assert timed(iter(stream))[0] == pytest.approx(0.05 / 8, rel=0.15)


def test_a_loader_that_never_keeps_anyone_waiting_ends_as_well() -> None:
    found, drawn = timed(itertools.count(1.0, 1e-5))
    assert drawn == 49
    assert found == pytest.approx(1e-5, rel=1e-3)
    assert timed(itertools.repeat(1.0)) == (0.0, 49)


def test_a_slow_loader_is_not_waited_for_without_end() -> None:
    assert timed(itertools.count(9.0, 9.0))[1] == 4
    assert timed(itertools.count(9.0, 9.0), least=1) == (9.0, 2)


@pytest.mark.parametrize("place", [2, 40])
def test_one_long_wait_is_not_taken_for_the_pace(place: int) -> None:
    """A mean over all batches, or nearly all of them, holds it once."""
    seconds = [0.01] * 48
    seconds[place] += 0.3
    found = seconds_per_batch(arrivals_after(seconds))
    assert found == pytest.approx(0.01 + 0.3 / 47, rel=0.2)
