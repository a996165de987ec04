"""The drift guard: when it times the baseline again, and when two timings differ at all."""

from __future__ import annotations

import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from factories import FakeClock, no_contention

from autoprec.core.dtypes import Policy
from autoprec.core.measurement import Measurement
from autoprec.core.speed.space import Space
from autoprec.core.speed.trial_results import Outcome, Status, combined
from autoprec.tuning.search.drift_correction import DriftMonitor, drift_between
from autoprec.workers.client import WorkerSettings
from autoprec.workers.failures import FailureKind, WorkerFailure
from autoprec.workers.runner import Runner
from tests.workers.test_runner import Starts

SPACE = Space(policies=(Policy.FLOAT32,), batch_sizes=(8, 16))
JOB = SimpleNamespace(
    options=SimpleNamespace(seed=0),
    contention_monitor=no_contention(),
)


def measured(seconds: float, spread: float = 0.01) -> Measurement:
    return Measurement(seconds, seconds * (1 - spread), seconds * (1 + spread), 20, 8.0)


FIRST = Outcome(SPACE.points()[0], Status.OK, measured(0.010))


def make(
    *answers: Any, kept: list[Outcome] | None = None
) -> tuple[DriftMonitor, FakeClock, Runner, Starts]:
    starts, clock = Starts(*answers), FakeClock()
    runner = Runner(WorkerSettings(Path("task.py")), None, cast(Any, starts))
    keep = ([] if kept is None else kept).append
    return DriftMonitor(cast(Any, JOB), SPACE, keep, clock), clock, runner, starts


def test_the_baseline_is_not_timed_again_at_once() -> None:
    guard, clock, runner, starts = make(measured(0.02))
    assert guard.check(runner, None) == 1.0
    clock.now = 5.0
    assert guard.check(runner, FIRST) == 1.0
    assert len(starts.answers) == 1


def drifts(*steps: float, every: float = 30.0, fresh: bool = True) -> list[float]:
    """What the guard says before each trial where the baseline takes these steps."""
    kept = [FIRST]
    guard, clock, runner, starts = make(*map(measured, steps), kept=kept)
    if fresh:
        guard.check(runner, None)
    said = []
    while starts.answers:
        clock.now += every
        said.append(guard.check(runner, combined(kept)))
    return said


def test_a_machine_at_half_speed_halves_the_drift_when_two_timings_say_so() -> None:
    assert drifts(0.01, 0.02, 0.02, 0.01, 0.01) == pytest.approx([1.0, 1.0, 0.5, 0.5, 1.0])


def test_what_is_over_at_the_next_timing_is_no_drift() -> None:
    assert drifts(0.01, 0.02, 0.01, 0.02, 0.01) == [1.0] * 5


def test_of_two_timings_that_saw_a_change_the_smaller_counts() -> None:
    assert drifts(0.01, 0.02, 0.0125, 0.0125) == pytest.approx([1.0, 1.0, 0.8, 0.8])
    assert drifts(0.01, 0.02, 0.005, 0.005) == pytest.approx([1.0, 1.0, 1.0, 2.0])


@pytest.mark.parametrize(
    ("steps", "kept"),
    [
        pytest.param((0.0102, 0.0103), [0.0102], id="they agree"),
        pytest.param((0.005, 0.005, 0.005), [0.005, 0.005], id="the first was disturbed"),
        pytest.param((0.02, 0.0101, 0.02), [0.02, 0.0101], id="the second was disturbed"),
    ],
)
def test_the_first_timings_are_replicates_that_the_search_compares_with(
    steps: tuple[float, ...], kept: list[float]
) -> None:
    """Where two differ, a third decides; later ones are compared with what the search uses."""
    replicates = [FIRST]
    guard, clock, runner, starts = make(*map(measured, steps), kept=replicates)
    guard.check(runner, None)
    while starts.answers:
        clock.now += 30.0
        assert guard.check(runner, combined(replicates)) == 1.0
    found = [each.measurement.step_seconds for each in replicates[1:] if each.measurement]
    assert found == kept
    assert combined(replicates).rate == pytest.approx(
        8.0 / sorted([0.01, *kept])[len(kept) // 2], rel=0.02
    )


def test_a_steady_machine_does_not_seem_to_become_slower() -> None:
    """Sessions that differ by a tenth, with a reference that is none of their extremes."""
    draw, logs = random.Random(7), []
    for _ in range(200):
        steps = [0.01 * draw.lognormvariate(0.0, 0.1) for _ in range(7)]
        logs.append(math.log(drifts(*steps)[-1]))
    assert abs(sum(logs) / len(logs)) < 0.015


def test_a_change_is_looked_at_again_after_the_next_trial() -> None:
    guard, clock, runner, starts = make(*map(measured, (0.01, 0.02, 0.02, 0.0205, 0.02)))
    guard.check(runner, None)
    clock.now = 7.0
    guard.check(runner, FIRST)
    clock.now = 30.0
    guard.check(runner, FIRST)
    clock.now = 31.0
    assert guard.check(runner, FIRST) == pytest.approx(0.5)
    clock.now = 52.0  # as slow as the drift says, but for a little
    assert guard.check(runner, FIRST) == pytest.approx(0.5)
    clock.now = 53.0
    assert guard.check(runner, FIRST) == pytest.approx(0.5)
    assert len(starts.answers) == 1


def trials_in(*steps: float) -> list[float]:
    """The drift of trials 15 s apart, where the baseline takes these steps when it is timed."""
    guard, clock, runner, starts = make(*map(measured, steps))
    guard.check(runner, None)
    clock.now = 30.0
    said = []
    while starts.answers:
        guard.check(runner, FIRST)
        said.append(guard.drift_of_trial(runner, FIRST))
        clock.now += 15.0
    return said


def test_a_trial_is_not_corrected_by_a_disturbance_that_was_over_when_it_had_run() -> None:
    """Two timings saw half the speed; the one after the trial that followed does not."""
    assert trials_in(0.01, 0.02, 0.02, 0.01, 0.01) == [1.0] * 5


def test_a_drift_that_lasts_corrects_every_trial() -> None:
    assert trials_in(0.01, 0.02, 0.02, 0.02, 0.02) == pytest.approx([1.0, 1.0, 1.0, 0.5, 0.5])


def test_a_small_drift_is_not_looked_at_after_each_trial() -> None:
    guard, clock, runner, starts = make(*map(measured, (0.01, 0.0107, 0.0107, 0.01)))
    guard.check(runner, None)
    for clock.now in (30.0, 60.0, 90.0):
        guard.check(runner, FIRST)
        assert guard.drift_of_trial(runner, FIRST) == 1.0
    assert len(starts.answers) == 1


def test_a_resumed_search_is_anchored_by_two_timings_before_its_first_trial() -> None:
    assert drifts(0.008, 0.008, every=1.0, fresh=False) == pytest.approx([1.25])
    assert drifts(0.72, 0.6, every=1.0, fresh=False) == pytest.approx([1 / 60])
    assert drifts(0.72, 0.01, every=1.0, fresh=False) == pytest.approx([1.0])


def test_noise_is_not_drift() -> None:
    def again(seconds: float) -> Outcome:
        return Outcome(FIRST.point, Status.OK, measured(seconds))

    assert drift_between(FIRST, again(0.011)) == 1.0
    assert drift_between(FIRST, again(0.0112)) == pytest.approx(0.01 / 0.0112)


def test_a_check_that_fails_leaves_the_drift_as_it_was() -> None:
    failure = WorkerFailure(FailureKind.OUT_OF_MEMORY, "no room")
    guard, _, runner, _ = make(failure)
    assert guard.check(runner, FIRST) == 1.0


def test_the_rate_of_an_outcome_has_the_drift_taken_out() -> None:
    slow = Outcome(FIRST.point, Status.OK, measured(0.02), drift=0.5)
    assert slow.rate == pytest.approx(FIRST.rate)
