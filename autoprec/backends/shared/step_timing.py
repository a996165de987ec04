"""Times training steps until a budget says enough, the same way for every framework.

Steps in which the process's memory still grows are warm-up: new pages have to be cleared.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from autoprec.backends.protocol import ProgressCallback
from autoprec.backends.shared.process_memory import MemoryGrowth
from autoprec.backends.shared.ranks import Agree, unchanged
from autoprec.core.measurement import Measurement
from autoprec.core.speed.timing_budget import TimingBudget, summarize, timing_may_stop

CHECK_SECONDS = 0.05
"""Steps are timed for about so long between two checks of the budget."""

_MAX_ROUNDS_PER_CHECK = 8

_MAX_GROWTH_BUDGETS = 3.0
"""Steps in which memory grows are warm-up, for at most this many times the budget's seconds."""


@dataclass
class TimedSteps:
    """The seconds of each update, and what was warm-up because memory still grew.

    A round is what is timed as one: `updates` of the weights.
    """

    updates: int = 1
    times: list[float] = field(default_factory=list)
    growth_rounds: int = 0
    growth_seconds: float = 0.0

    def measurement(
        self,
        *,
        samples_per_step: float,
        data_seconds: float,
        peak_memory_bytes: int,
        build_seconds: float,
        finite: bool,
        notes: Sequence[str],
        first_updates: int | None = None,
    ) -> Measurement:
        """Return the measurement; building, with `first_updates` or one round, took that long."""
        summary = summarize(self.times)
        first = self.updates if first_updates is None else first_updates
        warmup_rounds = self.growth_rounds + summary.warmup
        in_warmup = sum(self.times[: summary.warmup]) * self.updates
        return Measurement(
            step_seconds=summary.median,
            low=summary.low,
            high=summary.high,
            steps=summary.steps * self.updates,
            samples_per_step=samples_per_step,
            peak_memory_bytes=peak_memory_bytes,
            data_seconds=data_seconds,
            warmup_seconds=build_seconds + self.growth_seconds + in_warmup,
            warmup_steps=first + warmup_rounds * self.updates,
            finite=finite,
            notes=tuple(notes),
        )


def time_steps(
    time_rounds: Callable[[int], list[float]],
    budget: TimingBudget,
    report: ProgressCallback,
    *,
    updates: int = 1,
    agree: Agree = unchanged,
) -> TimedSteps:
    """Time rounds, each of `updates` of the weights, until the budget says enough.

    `time_rounds` runs `count` rounds and returns the seconds of each: of the slowest rank, where
    several train together. `agree` makes every other reading the same on all of them.
    """
    timed = TimedSteps(updates)
    memory = MemoryGrowth()
    start = time.perf_counter()
    while not timing_may_stop(
        timed.times, budget, agree(time.perf_counter() - start) - timed.growth_seconds
    ):
        seconds = time_rounds(_rounds_before_next_check(timed))
        grew = agree(memory.since_last_check()) > 0
        if grew and timed.growth_seconds < _MAX_GROWTH_BUDGETS * budget.seconds:
            timed.growth_rounds += len(seconds)
            timed.growth_seconds += sum(seconds)
        else:
            timed.times += [each / updates for each in seconds]
        report("steps", len(timed.times))
    return timed


def in_rounds(budget: TimingBudget, updates: int) -> TimingBudget:
    """Return the budget for times that are each of a round of several updates."""
    if updates == 1:
        return budget
    least = max(2, math.ceil(budget.min_steps / updates))
    most = max(least, budget.max_steps // updates)
    return replace(budget, min_steps=least, max_steps=most)


def _rounds_before_next_check(timed: TimedSteps) -> int:
    """Return one while rounds are slow or unknown, more when they are fast."""
    seconds = timed.times[-1] if timed.times else math.inf
    if seconds > CHECK_SECONDS:
        return 1
    return min(_MAX_ROUNDS_PER_CHECK, max(1, math.ceil(CHECK_SECONDS / max(seconds, 1e-6))))
