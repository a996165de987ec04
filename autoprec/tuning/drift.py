"""The drift guard: the baseline is timed again between trials, and what follows is corrected by it.

A machine that slows down while a search runs (its clock falls, a neighbour wakes up) would make
late recipes look worse than early ones. A correction is only applied where the two timings of the
baseline differ by more than their intervals: noise must not be taken for drift.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from autoprec.core.measurement import Measurement, TimingBudget
from autoprec.core.search import Outcome
from autoprec.core.space import Space
from autoprec.tuning.trials import Runner, run_trial
from autoprec.tuning.work import Work

_SECONDS = 20.0
_SHARE = 20.0
_BUDGET = TimingBudget(seconds=0.5, min_steps=4, max_steps=40)


class DriftGuard:
    """Knows how fast the baseline runs now, relative to its first timing."""

    def __init__(
        self, work: Work, space: Space, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._work, self._space, self._clock = work, space, clock
        self._due: float | None = None
        self.drift = 1.0

    def check(self, runner: Runner, first: Outcome | None) -> float:
        """Return the drift; time the baseline again where its last timing is old.

        `first` is how the baseline came out; None: it is to be timed now for the first time.

        A timing is old after 20 s, or twenty times what the last check took. A tuning that goes on
        from a study checks before its first trial.
        """
        if first is None:
            self._due = self._clock() + _SECONDS
            return 1.0
        if first.measurement is None or first.rate <= 0:
            return 1.0
        began = self._clock()
        if self._due is not None and began < self._due:
            return self.drift
        recipe = self._space.recipe(first.point)
        with self._work.watch.over(lambda: runner.pids):
            again = run_trial(
                runner, first.point, recipe, seed=self._work.options.seed, budget=_BUDGET
            )
        if again.measurement is not None and again.rate > 0:
            self.drift = drift_between(first.measurement, again.measurement)
        took = self._clock() - began
        self._due = self._clock() + max(_SECONDS, _SHARE * took)
        return self.drift


def drift_between(first: Measurement, again: Measurement) -> float:
    """How fast the same recipe ran the second time (1: as the first time, within their noise)."""
    if again.low <= first.high and first.low <= again.high:
        return 1.0
    return again.samples_per_second / first.samples_per_second
