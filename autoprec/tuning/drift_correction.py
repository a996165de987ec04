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
_SOON, _SECONDS, _SHARE = 6.0, 20.0, 20.0

#: A drift that differs by more, as a logarithm, is looked at again; a larger one, after each trial.
_CHANGE = 0.1

_BUDGET = TimingBudget(seconds=0.5, min_steps=4, max_steps=40)


class DriftGuard:
    """Knows how fast the baseline runs now, relative to its first timings."""

    def __init__(
        self, job: TuningJob, space: Space, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._job, self._space, self._clock = job, space, clock
        self._due: float | None = None
        self._young = False
        self._reference: Measurement | None = None
        self._last = 1.0
        self.drift = 1.0

    def check(self, runner: Runner, first: Outcome | None) -> float:
        """Return the drift; time the baseline again where its last timing is old.

        `first` is how the baseline came out; None: it is to be timed now for the first time. Soon
        after that it is timed once more, and the faster of the two is what all others are compared
        with. Later a timing is old after 20 s, or twenty times what it took, and one that saw a
        change after the next trial.
        """
        if first is None:
            self._due, self._young = self._clock() + _SOON, True
            return 1.0
        if first.measurement is None or first.rate <= 0:
            return 1.0
        if self._due is None:
            return self.anchor(runner, first)
        if self._clock() >= self._due:
            self._look(runner, first)
        return self.drift

    def anchor(self, runner: Runner, first: Outcome) -> float:
        """Return the drift since an earlier tuning, which this one goes on from.

        The baseline is timed before any other trial, and where it differs at once again.
        """
        self._look(runner, first)
        if self._due is not None and self._clock() >= self._due:
            self._look(runner, first)
        return self.drift

    def of_trial(self, runner: Runner, first: Outcome | None) -> float:
        """Return the drift of the trial that just ran: of a large one what is left of it now."""
        before = self.drift
        if first is None or abs(math.log(before)) <= _CHANGE:
            return before
        after = self._look(runner, first)
        self._due = self._clock() + _SECONDS  # while it is large, the next look is after a trial
        return min(before, after, key=lambda drift: abs(math.log(drift)))

    def _look(self, runner: Runner, first: Outcome) -> float:
        """Time the baseline, take on the change that it settles, and return what it saw."""
        began = self._clock()
        assert first.measurement is not None
        reference = self._reference or first.measurement
        again = self._time(runner, first)
        if again is not None and self._young:
            reference = min(reference, again, key=lambda m: m.step_seconds)
        self._young, self._reference = False, reference
        seen = self.drift if again is None else drift_between(reference, again)
        suspected = self._settle(seen)
        ended = self._clock()
        self._due = ended if suspected else ended + max(_SECONDS, _SHARE * (ended - began))
        return seen

    def _time(self, runner: Runner, first: Outcome) -> Measurement | None:
        recipe = self._space.recipe(first.point)
        with self._job.contention_monitor.over(lambda: runner.pids):
            again = run_trial(
                runner, first.point, recipe, seed=self._job.options.seed, budget=_BUDGET
            )
        return again.measurement if again.rate > 0 else None

    def _settle(self, seen: float) -> bool:
        """Take a change on where two timings in a row saw it, the smaller; say if one alone did."""
        both, self._last = (self._last, seen), seen
        if not min(both) <= self.drift <= max(both):
            self.drift = min(both, key=lambda drift: abs(math.log(drift / self.drift)))
            return False
        return abs(math.log(seen / self.drift)) > _CHANGE


def drift_between(first: Measurement, again: Measurement) -> float:
    """How fast the same recipe ran the second time (1: as the first time, within their noise)."""
    if again.low <= first.high and first.low <= again.high:
        return 1.0
    return again.samples_per_second / first.samples_per_second
