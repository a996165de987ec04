"""Corrects trials for machine drift: the baseline is timed again between them.

A machine that slows down during a search (its clock drops, another process starts) would make late
recipes look worse than early ones. On shared machines, though, most disturbances last seconds, and
correcting for one of those would be an error of its own. So a change counts only when two
consecutive timings show it, beyond what sessions of one recipe differ by, with a trial between
them. While a change counts, the baseline is timed after every trial, and a trial is not corrected
for a disturbance that has ended by then: the recipe that ran just after a disturbance must not come
out fastest.

What the baseline is compared with is all that the search compares with it: its first timings are
replicates of one trial (see `trial_results.combined`), none of which is preferred for being the
fastest. Taking the fastest would make every later one look like a slower machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial

from autoprec.core.speed.assumptions import SPEED
from autoprec.core.speed.space import Space
from autoprec.core.speed.timing_budget import TimingBudget
from autoprec.core.speed.trial_results import Outcome, ran
from autoprec.tuning.job import TuningJob
from autoprec.workers.runner import Runner, run_trial

#: Seconds until the baseline's first timing is repeated; later ones are due after this many
#: seconds, or this many times what the last timing cost.
_FIRST_CHECK_SECONDS, _CHECK_SECONDS, _CHECK_COST_MULTIPLE = 6.0, 20.0, 20.0

#: Timings of the baseline beyond its trial that count as its replicates: one, and another where the
#: first two show different speeds.
_MOST_REPLICATES = 2

_BUDGET = TimingBudget(seconds=0.5, min_steps=4, max_steps=40)


class DriftMonitor:
    """Tracks how fast the baseline runs now, relative to its first timings."""

    def __init__(
        self,
        job: TuningJob,
        space: Space,
        keep: Callable[[Outcome], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._job, self._space, self._keep, self._clock = job, space, keep, clock
        self._next_check: float | None = None
        self._replicates_left = 0
        self._last_observed = 1.0
        self.drift = 1.0

    def check(self, runner: Runner, first: Outcome | None) -> float:
        """Return the drift; time the baseline again where its last timing is old.

        `first` is the baseline's trial; None where it is about to be timed for the first time. Soon
        after that it is timed once more, and `keep` is told that replicate. Later a timing is old
        after 20 s or twenty times its own cost, and after the next trial where it showed an
        unconfirmed change.
        """
        if first is None:
            self._next_check = self._clock() + _FIRST_CHECK_SECONDS
            self._replicates_left = _MOST_REPLICATES
            return 1.0
        if first.measurement is None or first.rate <= 0:
            return 1.0
        if self._next_check is None:
            return self.measure_since_resume(runner, first)
        if self._clock() >= self._next_check:
            self._check_now(runner, first)
        return self.drift

    def measure_since_resume(self, runner: Runner, first: Outcome) -> float:
        """Return the drift since the earlier tuning that this one resumes.

        The baseline is timed before any other trial, and twice where the first timing differs.
        """
        self._check_now(runner, first)
        if self._next_check is not None and self._clock() >= self._next_check:
            self._check_now(runner, first)
        return self.drift

    def drift_of_trial(self, runner: Runner, first: Outcome | None) -> float:
        """Return the drift for the trial that just ran; a large one is measured again first."""
        before = self.drift
        if first is None or abs(math.log(before)) <= SPEED.drift_log_threshold:
            return before
        after = self._check_now(runner, first)
        # While the drift is large, the baseline is timed after each trial and not before the next.
        self._next_check = self._clock() + _CHECK_SECONDS
        return min(before, after, key=lambda drift: abs(math.log(drift)))

    def _check_now(self, runner: Runner, first: Outcome) -> float:
        """Time the baseline, accept a change that this confirms, and return the observed drift."""
        began = self._clock()
        again = self._time_baseline(runner, first)
        observed = self.drift if again is None else drift_between(first, again)
        if again is not None and self._replicates_left:
            self._keep(again)
            unconfirmed = observed != 1.0 and self._replicates_left == _MOST_REPLICATES
            self._replicates_left = 1 if unconfirmed else 0
            observed = 1.0
        else:
            unconfirmed = self._confirm_change(observed)
        ended = self._clock()
        self._next_check = (
            ended
            if unconfirmed
            else ended + max(_CHECK_SECONDS, _CHECK_COST_MULTIPLE * (ended - began))
        )
        return observed

    def _time_baseline(self, runner: Runner, first: Outcome) -> Outcome | None:
        recipe = self._space.recipe(first.point)
        seed = self._job.options.seed
        run = partial(run_trial, runner, first.point, recipe, seed=seed, budget=_BUDGET)
        again = self._job.contention_monitor.undisturbed(run, lambda: runner.pids, ran)
        return again if again.rate > 0 else None

    def _confirm_change(self, observed: float) -> bool:
        """Accept the smaller of two consecutive changes; say whether one alone is unconfirmed."""
        both, self._last_observed = (self._last_observed, observed), observed
        if not min(both) <= self.drift <= max(both):
            self.drift = min(both, key=lambda drift: abs(math.log(drift / self.drift)))
            return False
        return abs(math.log(observed / self.drift)) > SPEED.drift_log_threshold


def drift_between(first: Outcome, again: Outcome) -> float:
    """Return how fast a recipe ran the second time, relative to the first; 1 within the noise."""
    ratio = again.rate / first.rate
    return 1.0 if abs(math.log(ratio)) <= SPEED.drift_log_threshold else ratio
