"""The clock of a trajectory: the first step is apart, and a run ends when its time is up."""

from __future__ import annotations

import pytest

from autoprec.backends.shared import trajectory_clock
from autoprec.backends.shared.trajectory_clock import StepClock


@pytest.fixture
def now(monkeypatch):
    """A clock that is set by hand."""
    time = [0.0]
    monkeypatch.setattr(trajectory_clock.time, "perf_counter", lambda: time[0])
    return time


def steps_made(clock: StepClock, now: list[float], durations: list[float]) -> int:
    for made, duration in enumerate(durations):
        if not clock.tick():
            return made
        now[0] += duration
    clock.tick()
    return len(durations)


@pytest.mark.parametrize(("seconds", "made"), [(None, 9), (4.5, 6), (0.0, 1)])
def test_a_run_ends_when_its_time_is_up_the_first_step_apart(now, seconds, made):
    assert steps_made(StepClock(seconds), now, [30.0] + [1.0] * 8) == made


@pytest.mark.parametrize(
    ("durations", "least"), [([30.0, 9.0, 2.0, 3.0], 2.0), ([30.0, 1.0], 1.0), ([30.0], 30.0)]
)
def test_a_step_takes_the_least_of_those_after_the_first(now, durations, least):
    clock = StepClock()
    steps_made(clock, now, durations)
    assert clock.step_seconds == least
    assert clock.elapsed == sum(durations)


def test_on_a_cpu_a_step_takes_its_own_processor_time(now, monkeypatch):
    worked = [0.0]
    monkeypatch.setattr(trajectory_clock.time, "process_time", lambda: worked[0])
    clocks = StepClock(on_cpu=True), StepClock()
    for delay, work in ((30.0, 20.0), (9.0, 1.5), (8.0, 2.5)):
        for clock in clocks:
            clock.tick()
        now[0] += delay
        worked[0] += work
    for clock in clocks:
        clock.tick()
    assert [clock.step_seconds for clock in clocks] == [1.5, 8.0]


def test_without_a_step_nothing_is_known():
    assert StepClock().step_seconds == 0.0
