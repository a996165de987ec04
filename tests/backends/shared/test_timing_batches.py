"""A session has a few full batches, as far as memory may hold them, and the loader's time."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from autoprec.backends.shared import timing_batches
from autoprec.backends.shared.timing_batches import fetch_batches


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


@pytest.mark.parametrize(("sizes", "loader"), [([8], 2.0), ([8, *[3] * 20], 2.0)])
def test_the_first_loading_is_no_step_s(monkeypatch, sizes, loader):
    assert fetch(sizes, monkeypatch, seconds=[9.0] + [2.0] * 20).loader_seconds == loader


def test_the_only_loading_is_the_loaders_time(monkeypatch):
    whole = fetch([8], monkeypatch, size_in_bytes=lambda batch: 2**30, seconds=[9.0])
    assert whole.loader_seconds == 9.0
