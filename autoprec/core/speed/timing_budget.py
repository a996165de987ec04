"""Decides how many steps a trial times: warm-up dropped, until the median step is precise enough.

Times are in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoprec.core.statistics import median, median_interval


@dataclass(frozen=True)
class TimingBudget:
    """How long one timing may take, and how precise it must become.

    Timing stops when the confidence interval of the median step is narrower than `precision`
    (relative, full width), after `seconds`, or after `max_steps`; never before `min_steps`.
    `too_slow_seconds`, where given, is a step time that is clearly too slow: a step above twice
    that ends the timing early. `expected_seconds` is the step time that was expected: where steps
    take clearly longer, a trial times them twice (see `noise.seems_disturbed`).
    """

    seconds: float = 2.0
    min_steps: int = 5
    max_steps: int = 200
    precision: float = 0.02
    too_slow_seconds: float | None = None
    expected_seconds: float | None = None


@dataclass(frozen=True)
class Summary:
    """A median with its 95 % interval, and how many leading values were dropped as warm-up."""

    median: float
    low: float
    high: float
    steps: int
    warmup: int = 0

    @property
    def spread(self) -> float:
        """Return the full width of the interval relative to the median."""
        return (self.high - self.low) / self.median if self.median else 0.0


def warmup_length(times: Sequence[float]) -> int:
    """Return how many leading steps are warm-up: those clearly slower than the second half.

    First steps compile, fault pages in and pick kernels. A leading step counts as warm-up while it
    exceeds the second half's median by 10 % or three times its own deviation, whichever is more;
    at least the second half is kept.
    """
    half = len(times) // 2
    if half == 0:
        return 0
    later = times[half:]
    centre = median(later)
    deviation = median([abs(time - centre) for time in later])
    limit = centre + max(0.10 * centre, 3 * 1.4826 * deviation)
    for index in range(half):
        if times[index] <= limit:
            return index
    return half


def summarize(times: Sequence[float]) -> Summary:
    """Drop the warm-up and give the median step with its interval."""
    warmup = warmup_length(times)
    steady = times[warmup:]
    low, high = median_interval(steady)
    return Summary(median(steady), low, high, len(steady), warmup)


def timing_may_stop(times: Sequence[float], budget: TimingBudget, elapsed: float) -> bool:
    """Return whether a timing may stop: precise enough, out of time, or clearly too slow.

    With fewer than `budget.min_steps` steps only four times `budget.seconds` stops it, so that a
    slow step is timed at least twice; a single step proves nothing.
    """
    if not times:
        return False
    too_slow = budget.too_slow_seconds
    if too_slow is not None and len(times) >= 2 and min(times) > 2 * too_slow:
        return True
    if len(times) < budget.min_steps:
        return elapsed >= 4 * budget.seconds and len(times) >= 2
    if len(times) >= budget.max_steps or elapsed >= budget.seconds:
        return True
    summary = summarize(times)
    return summary.steps >= max(6, budget.min_steps) and summary.spread <= budget.precision
