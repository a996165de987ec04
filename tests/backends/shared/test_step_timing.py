"""Steps are timed until a budget says enough; those in which memory grows are warm-up."""

from __future__ import annotations

import pytest

from autoprec.backends.shared import process_memory, step_timing
from autoprec.backends.shared.step_timing import TimedSteps, in_rounds, time_steps
from autoprec.core.speed.timing_budget import TimingBudget

BUDGET = TimingBudget(seconds=10.0, min_steps=3, max_steps=20)


@pytest.fixture
def now(monkeypatch):
    """A clock that is set by hand."""
    time = [0.0]
    monkeypatch.setattr(step_timing.time, "perf_counter", lambda: time[0])
    return time


@pytest.fixture
def resident(monkeypatch):
    """The peak of the process's memory, set by hand."""
    peak = [0]
    monkeypatch.setattr(process_memory, "peak_resident_bytes", lambda: peak[0])
    return peak


def rounds(now, seconds, counts, grows=lambda _: None):
    def run(count):
        counts.append(count)
        for _ in range(count):
            now[0] += seconds
            grows(sum(counts))
        return [seconds] * count

    return run


@pytest.mark.parametrize(("seconds", "chunk"), [(1.0, 1), (0.02, 3), (0.0001, 8)])
def test_fast_steps_are_timed_several_between_two_checks(now, resident, seconds, chunk):
    counts, reported = [], []
    timed = time_steps(
        rounds(now, seconds, counts), BUDGET, lambda phase, step: reported.append((phase, step))
    )
    assert counts[0] == 1
    assert set(counts[1:]) == {chunk}
    assert timed.times == [seconds] * sum(counts)
    assert reported[-1] == ("steps", sum(counts))


def test_steps_in_which_memory_grows_are_warm_up(now, resident):
    def grow(made):
        resident[0] = min(made, 4) * 2**30

    timed = time_steps(rounds(now, 1.0, [], grow), BUDGET, lambda *_: None)
    assert (timed.growth_rounds, timed.growth_seconds) == (4, 4.0)
    assert len(timed.times) >= BUDGET.min_steps


def test_memory_that_never_stops_growing_is_timed_all_the_same(now, resident):
    def grow(made):
        resident[0] = made * 2**30

    timed = time_steps(rounds(now, 1.0, [], grow), BUDGET, lambda *_: None)
    assert timed.growth_seconds == 3 * BUDGET.seconds
    assert len(timed.times) >= BUDGET.min_steps


def test_a_round_of_several_updates_counts_each(now, resident):
    timed = time_steps(rounds(now, 1.0, []), BUDGET, lambda *_: None, updates=4)
    assert set(timed.times) == {0.25}
    measured = timed.measurement(
        samples_per_step=8.0,
        data_seconds=0.5,
        peak_memory_bytes=7,
        build_seconds=2.0,
        finite=True,
        notes=["said"],
    )
    assert measured.step_seconds == 0.25
    assert measured.steps + measured.warmup_steps == (len(timed.times) + 1) * 4
    assert (measured.samples_per_step, measured.data_seconds) == (8.0, 0.5)
    assert (measured.peak_memory_bytes, measured.finite, measured.notes) == (7, True, ("said",))


def test_warm_up_is_all_that_came_before_the_steady_steps():
    timed = TimedSteps(updates=2, times=[9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0], growth_rounds=3)
    timed.growth_seconds = 5.0
    measured = timed.measurement(
        samples_per_step=1.0,
        data_seconds=0.0,
        peak_memory_bytes=0,
        build_seconds=10.0,
        finite=True,
        notes=(),
    )
    skipped = len(timed.times) - measured.steps // 2
    assert skipped >= 1
    assert measured.warmup_steps == (1 + 3 + skipped) * 2
    assert measured.warmup_seconds == 10.0 + 5.0 + sum(timed.times[:skipped]) * 2


def test_a_round_of_several_updates_counts_as_so_many_steps():
    assert in_rounds(BUDGET, 1) == BUDGET
    four = in_rounds(BUDGET, 4)
    assert (four.min_steps, four.max_steps, four.seconds) == (2, 5, BUDGET.seconds)
    assert (in_rounds(BUDGET, 40).min_steps, in_rounds(BUDGET, 40).max_steps) == (2, 2)


@pytest.mark.parametrize(("first", "warmup"), [(None, 4), (3, 3)])
def test_the_updates_before_the_first_round_are_warmup(first, warmup):
    measured = TimedSteps(4, times=[1.0] * 6).measurement(
        samples_per_step=8,
        data_seconds=0.0,
        peak_memory_bytes=1,
        build_seconds=0.0,
        finite=True,
        notes=(),
        first_updates=first,
    )
    assert (measured.warmup_steps, measured.steps) == (warmup, 24)
