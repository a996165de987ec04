"""The drift guard: the baseline is timed again between trials, and what follows is corrected by it.

A machine that slows down while a search runs (its clock falls, a neighbour wakes up) would make
late recipes look worse than early ones. On shared machines, though, most of what slows a step is
over within seconds: a correction for that would be an error of its own. So a change counts only
when two timings in a row see it, beyond their intervals, with a trial between them. And while a
large one counts, the baseline is timed after every trial: where it is over by then, the trial is
not corrected by it. The fastest recipe must not be who ran just after a disturbance.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from autoprec.core.measurement import Measurement, TimingBudget
from autoprec.core.speed.space import Space
from autoprec.core.speed.trial_results import Outcome
from autoprec.tuning.job import TuningJob
from autoprec.workers.runner import Runner, run_trial

#: When the first timing is done again, then every timing: seconds, or times what the last took.
_FIRST_CHECK_SECONDS, _CHECK_SECONDS, _CHECK_COST_MULTIPLE = 6.0, 20.0, 20.0

#: A drift that differs by more, as a logarithm, is looked at again; a larger one, after each trial.
_LOG_THRESHOLD = 0.1

_BUDGET = TimingBudget(seconds=0.5, min_steps=4, max_steps=40)


class DriftMonitor:
    """Knows how fast the baseline runs now, relative to its first timings."""

    def __init__(
        self, job: TuningJob, space: Space, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._job, self._space, self._clock = job, space, clock
        self._next_check: float | None = None
        self._first_check = False
        self._reference: Measurement | None = None
        self._last_observed = 1.0
        self.drift = 1.0

    def check(self, runner: Runner, first: Outcome | None) -> float:
        """Return the drift; time the baseline again where its last timing is old.

        `first` is how the baseline came out; None: it is to be timed now for the first time. Soon
        after that it is timed once more, and the faster of the two is what all others are compared
        with. Later a timing is old after 20 s, or twenty times what it took, and one that saw a
        change after the next trial.
        """
        if first is None:
            self._next_check, self._first_check = self._clock() + _FIRST_CHECK_SECONDS, True
            return 1.0
        if first.measurement is None or first.rate <= 0:
            return 1.0
        if self._next_check is None:
            return self.measure_since_resume(runner, first)
        if self._clock() >= self._next_check:
            self._check_now(runner, first)
        return self.drift

    def measure_since_resume(self, runner: Runner, first: Outcome) -> float:
        """Return the drift since an earlier tuning, which this one goes on from.

        The baseline is timed before any other trial, and where it differs at once again.
        """
        self._check_now(runner, first)
        if self._next_check is not None and self._clock() >= self._next_check:
            self._check_now(runner, first)
        return self.drift

    def drift_of_trial(self, runner: Runner, first: Outcome | None) -> float:
        """Return the drift of the trial that just ran: of a large one what is left of it now."""
        before = self.drift
        if first is None or abs(math.log(before)) <= _LOG_THRESHOLD:
            return before
        after = self._check_now(runner, first)
        self._next_check = (
            self._clock() + _CHECK_SECONDS
        )  # while it is large, the next look is after a trial
        return min(before, after, key=lambda drift: abs(math.log(drift)))

    def _check_now(self, runner: Runner, first: Outcome) -> float:
        """Time the baseline, take on the change that it settles, and return what it saw."""
        began = self._clock()
        assert first.measurement is not None
        reference = self._reference or first.measurement
        again = self._time_baseline(runner, first)
        if again is not None and self._first_check:
            reference = min(reference, again, key=lambda m: m.step_seconds)
        self._first_check, self._reference = False, reference
        observed = self.drift if again is None else drift_between(reference, again)
        unconfirmed = self._confirm_change(observed)
        ended = self._clock()
        self._next_check = (
            ended
            if unconfirmed
            else ended + max(_CHECK_SECONDS, _CHECK_COST_MULTIPLE * (ended - began))
        )
        return observed

    def _time_baseline(self, runner: Runner, first: Outcome) -> Measurement | None:
        recipe = self._space.recipe(first.point)
        with self._job.contention_monitor.over(lambda: runner.pids):
            again = run_trial(
                runner, first.point, recipe, seed=self._job.options.seed, budget=_BUDGET
            )
        return again.measurement if again.rate > 0 else None

    def _confirm_change(self, observed: float) -> bool:
        """Take a change on where two timings in a row saw it, the smaller; say if one alone did."""
        both, self._last_observed = (self._last_observed, observed), observed
        if not min(both) <= self.drift <= max(both):
            self.drift = min(both, key=lambda drift: abs(math.log(drift / self.drift)))
            return False
        return abs(math.log(observed / self.drift)) > _LOG_THRESHOLD


def drift_between(first: Measurement, again: Measurement) -> float:
    """How fast the same recipe ran the second time (1: as the first time, within their noise)."""
    if again.low <= first.high and first.low <= again.high:
        return 1.0
    return again.samples_per_second / first.samples_per_second
