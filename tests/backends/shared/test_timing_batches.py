"""A session has a few full batches, as far as memory may hold them, and the loader's time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator

import pytest

from autoprec.backends.shared import timing_batches
from autoprec.backends.shared.batch_survey import SAMPLES, Limits, Look, Survey, survey_batches
from autoprec.backends.shared.timing_batches import (
    SessionBatches,
    fetch_batches,
    fetch_representative_batches,
)


def fetch(sizes, monkeypatch, *, size_in_bytes=lambda batch: 1, seconds=()):
    closed, now = [], [0.0]
    monkeypatch.setattr(timing_batches.time, "perf_counter", lambda: now[0])

    def stream() -> Generator[list[int], None, None]:
        waits = iter(seconds)
        try:
            while True:
                for size in sizes:
                    now[0] += next(waits, 0.0)
                    yield [0] * size
        finally:
            closed.append(True)

    found = fetch_batches(
        stream(),
        counter=lambda first: len,
        place=lambda batch: ("placed", len(batch)),
        size_in_bytes=size_in_bytes,
    )
    assert closed
    return found


def test_a_smaller_last_batch_is_left_out(monkeypatch):
    found = fetch([8, 8, 3], monkeypatch)
    assert found.batches == [("placed", 8)] * 4
    assert found.samples == [8] * 4
    assert found.mean_samples == 8


def test_a_larger_batch_counts_by_its_own_samples(monkeypatch):
    assert fetch([4, 8], monkeypatch).mean_samples == 6


def test_a_loader_with_a_single_full_batch_is_not_searched_without_end(monkeypatch):
    assert fetch([8, *[3] * 20], monkeypatch).batches == [("placed", 8)]


@pytest.mark.parametrize(("megabytes", "count"), [(1, 4), (100, 2), (1000, 1)])
def test_memory_bounds_how_many_are_held(monkeypatch, megabytes, count):
    found = fetch([8], monkeypatch, size_in_bytes=lambda batch: megabytes * 2**20)
    assert len(found.batches) == count


@pytest.mark.parametrize("sizes", [[8], [8, *[3] * 200]])
def test_the_first_loading_is_no_step_s(monkeypatch, sizes):
    assert fetch(sizes, monkeypatch, seconds=[9.0] + [2.0] * 200).loader_seconds == 2.0


def test_a_batch_that_fills_the_memory_is_followed_by_others_for_the_loaders_time(monkeypatch):
    whole = fetch([8], monkeypatch, size_in_bytes=lambda batch: 2**30, seconds=[9.0, 3.0, 3.0, 3.0])
    assert (len(whole.batches), whole.loader_seconds) == (1, 3.0)


def test_batches_are_placed_once_the_loader_is_timed(monkeypatch):
    """Its workers would load more while a batch is copied, and the next one come at once."""
    order = []

    def stream():
        for number in itertools.count():
            order.append("drawn")
            yield [number]

    fetch_batches(
        stream(),
        counter=lambda first: len,
        place=lambda batch: order.append("placed"),
        size_in_bytes=lambda batch: 1,
    )
    assert order[-4:] == ["placed"] * 4
    assert set(order[:-4]) == {"drawn"}


class Lengths:
    """Batches of 8 samples that are known by their length."""

    def look(self, index: int, batch: int) -> Look:
        return Look(index, 8, 8 * batch, {"x": (SAMPLES, batch)})

    def copy(self, batch: int) -> int:
        return batch


def representative(
    lengths: Callable[[int], int],
    *,
    surveyed: int | None = None,
    agree: Callable[[float], float] = lambda value: value,
) -> tuple[SessionBatches, list[int]]:
    limited: list[int] = []

    def stream(repeat: bool) -> Generator[int, None, None]:
        step = 0
        while True:
            yield lengths(step)
            step += 1

    def look(limits: Limits) -> Survey:
        limited.append(limits.batches)
        return survey_batches(stream(False), lambda first: Lengths(), limits)

    found = fetch_representative_batches(
        stream,
        look=look,
        surveyed=surveyed,
        counter=lambda first: lambda batch: 8,
        place=lambda batch: ("placed", batch),
        size_in_bytes=lambda batch: 8 * batch,
        agree=agree,
    )
    return found, limited


def test_batches_of_one_length_are_the_first_ones():
    found, limited = representative(lambda step: 5)
    assert (found.batches, found.largest, found.mixed) == ([("placed", 5)] * 4, [], False)
    assert found.round_length == 1
    assert limited == [128]


def test_batches_known_to_be_alike_are_not_looked_at():
    found, limited = representative(lambda step: 8 + step, surveyed=0)
    assert [length for _, length in found.batches] == [8, 9, 10, 11]
    assert limited == []


def test_batches_that_differ_stand_for_all_and_the_largest_waits_in_main_memory():
    found, limited = representative(lambda step: 8 if step < 50 else 90, surveyed=200)
    assert limited == [200]
    assert [length for _, length in found.batches] == [8, 90, 90, 90]
    assert (found.largest, found.round_length) == ([90], 4)
    assert found.samples == [8] * 4


def test_ranks_take_as_many_steps_where_only_one_has_batches_that_differ():
    """The others agree that shapes differ, and on two largest batches and five in a round."""
    answers = iter([1.0, 5.0, 2.0])
    found, _ = representative(lambda step: 5, agree=lambda value: max(value, next(answers)))
    assert (len(found.batches), len(found.largest), found.round_length) == (5, 2, 5)
