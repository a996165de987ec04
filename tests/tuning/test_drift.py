"""The drift guard: when it times the baseline again, and when two timings differ at all."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autoprec.core.dtypes import Policy
from autoprec.core.measurement import Measurement
from autoprec.core.search import Outcome, Status
from autoprec.core.space import Space
from autoprec.tuning.drift import DriftGuard, drift_between
from autoprec.tuning.events import silent
from autoprec.tuning.failures import FailureKind, WorkerFailure
from autoprec.tuning.remote import WorkerSettings
from autoprec.tuning.trials import Runner
from tests.tuning.test_trials import Starts

SPACE = Space(policies=(Policy.FLOAT32,), batch_sizes=(8, 16))
WORK = SimpleNamespace(
    options=SimpleNamespace(seed=0), watch=SimpleNamespace(over=lambda pids: nullcontext())
)


def measured(seconds: float, spread: float = 0.01) -> Measurement:
    return Measurement(seconds, seconds * (1 - spread), seconds * (1 + spread), 20, 8.0)


FIRST = Outcome(SPACE.points()[0], Status.OK, measured(0.010))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(*answers: Any) -> tuple[DriftGuard, Clock, Runner, Starts]:
    starts, clock = Starts(*answers), Clock()
    runner = Runner(WorkerSettings(Path("task.py")), silent, cast(Any, starts))
    return DriftGuard(cast(Any, WORK), SPACE, clock), clock, runner, starts


def test_the_baseline_is_not_timed_again_soon_after_its_first_time() -> None:
    guard, clock, runner, starts = make(measured(0.02))
    assert guard.check(runner, None) == 1.0
    clock.now = 5.0
    assert guard.check(runner, FIRST) == 1.0
    assert len(starts.answers) == 1


def test_a_machine_at_half_speed_halves_the_drift_until_the_next_check() -> None:
    guard, clock, runner, starts = make(measured(0.02), measured(0.01))
    guard.check(runner, None)
    clock.now = 30.0
    assert guard.check(runner, FIRST) == pytest.approx(0.5)
    clock.now = 31.0
    assert guard.check(runner, FIRST) == pytest.approx(0.5)
    clock.now = 60.0
    assert guard.check(runner, FIRST) == 1.0
    assert starts.answers == []


def test_a_resumed_search_checks_before_its_first_trial() -> None:
    guard, _, runner, starts = make(measured(0.008))
    assert guard.check(runner, FIRST) == pytest.approx(1.25)
    assert starts.answers == []


def test_noise_is_not_drift() -> None:
    assert drift_between(measured(0.010, 0.05), measured(0.0104, 0.05)) == 1.0
    assert drift_between(measured(0.010, 0.001), measured(0.0104, 0.001)) < 1.0


def test_a_check_that_fails_leaves_the_drift_as_it_was() -> None:
    failure = WorkerFailure(FailureKind.OUT_OF_MEMORY, "no room")
    guard, _, runner, _ = make(failure)
    assert guard.check(runner, FIRST) == 1.0


def test_the_rate_of_an_outcome_has_the_drift_taken_out() -> None:
    slow = Outcome(FIRST.point, Status.OK, measured(0.02), drift=0.5)
    assert slow.rate == pytest.approx(FIRST.rate)
