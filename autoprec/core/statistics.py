"""Robust statistics of step times: medians, their intervals, warm-up, and when to stop.

Step times are skewed and machines drift, so nothing here assumes a normal distribution: intervals
of a median come from order statistics (the sign test), which hold for any distribution. Times are
in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from autoprec.core.codec import bounded
from autoprec.core.measurement import TimingBudget

CONFIDENCE = 0.95

#: How much longer than foreseen a disturbed step takes. Neighbours on a shared machine take a fifth
#: or more; beyond the upper bound it is the recipe that is slow.
_DISTURBED = (1.2, 1.65)


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
        """Full width of the interval relative to the median."""
        return (self.high - self.low) / self.median if self.median else 0.0


@dataclass(frozen=True)
class Ratio:
    """A ratio measured in alternating rounds: its median over rounds and the 95 % interval."""

    ratio: float = bounded(low=0.0, high=1e9)
    low: float = bounded(low=0.0, high=1e9)
    high: float = bounded(low=0.0, high=1e9)
    rounds: int = bounded(low=0, high=10**6)


def median(values: Sequence[float]) -> float:
    """The middle value, or the mean of the two middle ones."""
    if not values:
        raise ValueError("the median of nothing is not defined")
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


@cache
def _interval_rank(count: int, confidence: float) -> int:
    """How many values may be cut at either end so that the rest still covers the median.

    The number of values below the true median is Binomial(count, 1/2); the interval from the
    (r+1)-th smallest to the (r+1)-th largest covers it with 1 - 2 P(X <= r). Counted in integers:
    the numbers are exact and no count overflows.
    """
    ways, tail, rank = 1, 0, 0
    for successes in range(count // 2):
        tail += ways
        if 2 * tail / 2**count > 1 - confidence:
            break
        rank = successes
        ways = ways * (count - successes) // (successes + 1)
    return rank


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The interval of the median from order statistics; with few values, the whole range.

    Fewer than 6 values cannot give 95 %: then the range is the honest answer.
    """
    if not values:
        raise ValueError("the interval of nothing is not defined")
    ordered = sorted(values)
    rank = _interval_rank(len(ordered), confidence)
    return ordered[rank], ordered[-1 - rank]


def warmup_length(times: Sequence[float]) -> int:
    """How many leading steps are warm-up: those clearly slower than the second half.

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


def enough(times: Sequence[float], budget: TimingBudget, elapsed: float) -> bool:
    """Whether a timing may stop: sharp enough, out of time, or clearly too slow.

    With fewer than `budget.min_steps` steps only four times `budget.seconds` stops it, so that a
    slow step is timed twice at least; nothing is said of a single step.
    """
    if not times:
        return False
    hopeless = budget.hopeless_seconds
    if hopeless is not None and len(times) >= 2 and min(times) > 2 * hopeless:
        return True
    if len(times) < budget.min_steps:
        return elapsed >= 4 * budget.seconds and len(times) >= 2
    if len(times) >= budget.max_steps or elapsed >= budget.seconds:
        return True
    summary = summarize(times)
    return summary.steps >= max(6, budget.min_steps) and summary.spread <= budget.precision


def disturbed(step_seconds: float, foreseen_seconds: float | None) -> bool:
    """Whether a timing is so much slower than foreseen that the machine may have been disturbed.

    Or what foresaw it was wrong: only timing it again tells. Then the faster of the two counts, for
    nothing that disturbs a machine makes it faster.
    """
    if not foreseen_seconds:
        return False
    least, most = _DISTURBED
    return least < step_seconds / foreseen_seconds < most


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """The median of the rounds' ratios with its interval; round i pairs the i-th of each."""
    if len(numerators) != len(denominators) or not numerators:
        raise ValueError("a paired ratio needs as many numerators as denominators, at least one")
    ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
    low, high = median_interval(ratios)
    return Ratio(median(ratios), low, high, len(ratios))


def relative_spread(values: Sequence[float]) -> float:
    """How far repeated measurements of one thing lie apart: (max - min) / median."""
    centre = median(values) if values else 0.0
    return (max(values) - min(values)) / centre if centre else 0.0
