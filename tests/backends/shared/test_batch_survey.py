"""A survey looks at the shapes of many batches, keeps a few, and ends in time."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable

import pytest

from autoprec.backends.shared import batch_survey
from autoprec.backends.shared.batch_survey import SAMPLES, Limits, Look, Survey, survey_batches

FAR = Limits(batches=400, seconds=1e9, kept_bytes=2**40)

Given = tuple[int, ...]
"""A batch: its samples, its length, and how unlike its halves are in per cent."""


class View:
    def look(self, index: int, batch: Given) -> Look:
        samples, length, *unlike = batch
        shapes = {"x": (SAMPLES, length)}
        return Look(index, samples, samples * length, shapes, tuple(u / 100 for u in unlike))

    def copy(self, batch: Given) -> list[int]:
        return list(batch)


def stream(
    batches: Iterable[Given], closed: list[bool] | None = None
) -> Generator[Given, None, None]:
    try:
        yield from batches
    finally:
        if closed is not None:
            closed.append(True)


def survey(batches: Iterable[Given], limits: Limits = FAR) -> Survey:
    return survey_batches(stream(batches), lambda first: View(), limits)


def endless(length: Callable[[int], int]) -> Iterable[Given]:
    step = 0
    while True:
        yield 8, length(step)
        step += 1


def test_batches_of_one_shape_are_alike_whatever_the_last_one_holds() -> None:
    seen = survey([(8, 5), (8, 5), (3, 5)])
    assert not seen.varies
    assert (seen.batches_to_look_at, seen.typical(), seen.variation()) == (0, 0, "")
    assert list(seen.warnings()) == []


def test_an_endless_stream_is_looked_at_so_far_and_closed() -> None:
    closed: list[bool] = []
    batches = stream(endless(lambda step: 5), closed)
    seen = survey_batches(batches, lambda first: View(), FAR)
    assert len(seen.looks) == FAR.batches
    assert closed == [True]
    assert not seen.ended


def test_what_differs_is_said_with_its_range_and_how_much_was_seen() -> None:
    seen = survey((8, 8 if step < 60 else 256) for step in range(100))
    (warning,) = seen.warnings()
    assert "batches differ in shape: 8 to 256 in dimension 1 of x, in all 100 batches" in warning
    assert "longer" not in warning
    (warning,) = survey(endless(lambda step: 8 if step < 60 else 256)).warnings()
    assert "in the first 400 batches" in warning
    assert "a longer one further on may need more" in warning


def test_the_largest_is_kept_wherever_it_is() -> None:
    seen = survey((8, 999 if step == 333 else step % 7) for step in range(400))
    assert seen.largest() == [333]
    assert seen.kept[333] == [8, 999]
    assert len(seen.kept) < 50


def test_the_longest_of_each_length_counts_beside_the_largest() -> None:
    class Two(View):
        def look(self, index: int, batch: Given) -> Look:
            return Look(index, batch[0], batch[1] + batch[2], {"a": batch[1:2], "b": batch[2:3]})

    seen = survey_batches(
        stream([(2, 10, 10), (2, 18, 1), (2, 1, 19), (2, 10, 12)]), lambda first: Two(), FAR
    )
    assert seen.largest() == [1, 2, 3]


def test_a_mixture_stands_for_all_sizes_and_not_for_the_head() -> None:
    seen = survey((8, 8 if step < 60 else 256) for step in range(240))
    lengths = [seen.kept[index][1] for index in seen.mixture(4, 2**40)]
    assert lengths == [8, 256, 256, 256]


def test_a_mixture_keeps_within_memory_and_leaves_short_batches_out() -> None:
    seen = survey([(8, 10), (8, 20), (2, 30), (8, 40), (1, 90)])
    assert [seen.looks[index].samples for index in seen.mixture(4, 2**40)] == [8, 8, 8]
    assert len(seen.mixture(4, 330)) == 1
    assert seen.mixture(4, 1) != []


def test_batches_of_equal_length_in_words_are_all_taken() -> None:
    """Few long texts or many short ones: a batch with fewer texts is no short one."""
    seen = survey((8 >> step % 4, 10 << step % 4) for step in range(64))
    assert {seen.looks[i].samples for i in seen.mixture(4, 2**40)} != {8}


def test_memory_bounds_what_is_kept() -> None:
    seen = survey(((8, 100 + step % 2) for step in range(400)), Limits(400, 1e9, kept_bytes=8000))
    assert sum(8 * kept[1] for kept in seen.kept.values()) < 12000
    assert 0 in seen.kept


def test_the_kept_ones_are_copies() -> None:
    given = [[8, 1], [8, 2]]
    seen = survey(given)  # type: ignore[arg-type]
    given[0][1] = 9
    assert seen.kept[0] == [8, 1]


def test_batches_to_compare_are_even_and_begin_with_the_first_and_the_most_unlike() -> None:
    seen = survey((7 if step % 2 else 8, 5, 90 if step == 150 else step % 3) for step in range(300))
    chosen = seen.representatives(6)
    assert chosen[:2] == [0, 150]
    assert len(chosen) == 6
    assert all(seen.looks[index].samples == 8 for index in chosen)
    assert max(chosen) > 250


def test_a_rare_difference_is_not_lost_among_halves_that_always_differ() -> None:
    seen = survey((8, 5, 40 + step * 7 % 50, 25 * (step == 77)) for step in range(300))
    assert seen.representatives(6)[:2] == [0, 77]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(batch_survey.time, "perf_counter", lambda: now[0])
    return now


def slow(clock: list[float], first: float, later: float) -> Iterable[Given]:
    clock[0] += first
    for step in range(1000):
        yield 8, 5 + step % 2
        clock[0] += later


@pytest.mark.parametrize(
    ("first", "later", "count"), [(0.01, 0.01, 128), (1.0, 0.001, 400), (1.0, 1.0, 4), (30, 9, 1)]
)
def test_time_ends_a_survey_at_a_number_that_a_busier_machine_gives_too(
    clock: list[float], first: float, later: float, count: int
) -> None:
    assert len(survey(slow(clock, first, later), Limits(seconds=2.0)).looks) == count
    clock[0] = 0.0
    if count == 128:
        busier = survey(slow(clock, 1.3 * first, 1.3 * later), Limits(seconds=2.0))
        assert len(busier.looks) == count


@pytest.mark.parametrize("place", [0, 2, 60])
def test_one_batch_that_takes_long_does_not_end_a_survey(clock: list[float], place: int) -> None:
    """A busy machine may do something else for a while."""

    def batches() -> Iterable[Given]:
        for step in range(100):
            clock[0] += 5.0 if step == place else 0.001
            yield 8, 5

    assert len(survey(batches(), Limits(seconds=2.0)).looks) == 100


def test_a_loader_that_is_too_slow_is_said_with_how_many_were_seen(clock: list[float]) -> None:
    *_, warning = survey(slow(clock, 1.0, 1.0), Limits(seconds=2.0)).warnings()
    assert "only 4 batches were looked at, which took 4 s" in warning


def test_the_loaders_time_is_without_its_start(clock: list[float]) -> None:
    assert survey(slow(clock, 9.0, 0.001), FAR).loader_seconds == pytest.approx(0.001)
