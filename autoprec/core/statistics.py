"""Robust statistics of step times: medians, their intervals, warm-up, and when to stop.

Step times are skewed and machines drift, so nothing here assumes a normal distribution: intervals
of a median come from order statistics (the sign test), which hold for any distribution. Ratios of
two recipes in the same rounds err to either side alike, whichever of the two was disturbed; theirs
come from the signed ranks (Hodges and Lehmann, "Estimates of location based on rank tests", 1963),
which need a third fewer rounds than the median where errors are normal. Times are in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement

from autoprec.core.codec import bounded
from autoprec.core.measurement import TimingBudget

CONFIDENCE = 0.95

#: How much longer than expected a disturbed step takes. Other processes on a shared machine take a
#: fifth or more; beyond the upper bound it is the recipe that is slow.
_DISTURBED_RATIO_RANGE = (1.2, 1.65)


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


@dataclass(frozen=True)
class Ratio:
    """A ratio measured in alternating rounds: its pseudomedian over them and the 95 % interval."""

    ratio: float = bounded(low=0.0, high=1e9)
    low: float = bounded(low=0.0, high=1e9)
    high: float = bounded(low=0.0, high=1e9)
    rounds: int = bounded(low=0, high=10**6)


def median(values: Sequence[float]) -> float:
    """Return the middle value, or the mean of the two middle ones."""
    if not values:
        raise ValueError("the median of nothing is not defined")
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


def _largest_rank(ways: Iterable[int], count: int, confidence: float) -> int:
    """Return the largest r with 1 - 2 P(X <= r) >= `confidence`; X is k in the k-th of the `ways`.

    There are 2^count ways in all; r values may be cut at either end. Counted in integers: no count
    overflows.
    """
    tail, rank = 0, 0
    for number, each in enumerate(ways):
        tail += each
        if 2 * tail / 2**count > 1 - confidence:
            break
        rank = number
    return rank


@cache
def _sign_rank(count: int, confidence: float) -> int:
    """Return how many of `count` values may be cut at either end: the rest covers the median.

    The number of values below the true median is Binomial(count, 1/2).
    """
    return _largest_rank((math.comb(count, k) for k in range(count // 2)), count, confidence)


@cache
def _signed_rank(count: int, confidence: float) -> int:
    """Return how many of the pairwise means of `count` values may be cut at either end.

    Wilcoxon's statistic is the sum of those of the ranks 1 ... count whose sign is positive, each
    with probability 1/2; it equals the number of means above the centre.
    """
    most = count * (count + 1) // 4
    ways = [1] + [0] * most
    for rank in range(1, count + 1):
        for total in range(most, rank - 1, -1):
            ways[total] += ways[total - rank]
    return _largest_rank(ways, count, confidence)


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the interval of the median from order statistics; with few values, the whole range.

    Fewer than 6 values cannot give 95 %: then the range is the honest answer.
    """
    if not values:
        raise ValueError("the interval of nothing is not defined")
    ordered = sorted(values)
    rank = _sign_rank(len(ordered), confidence)
    return ordered[rank], ordered[-1 - rank]


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


def seems_disturbed(step_seconds: float, expected_seconds: float | None) -> bool:
    """Return whether a timing is slower than expected as if the machine had been disturbed.

    Or the expectation was wrong: only timing it again tells. Then the faster of the two counts,
    because no disturbance makes a machine faster.
    """
    if not expected_seconds:
        return False
    least, most = _DISTURBED_RATIO_RANGE
    return least < step_seconds / expected_seconds < most


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Return the pseudomedian of the rounds' ratios with its interval; round i pairs i-th values.

    It is the median of the geometric means of every two rounds' ratios. Fewer than 6 rounds cannot
    give 95 %: then the range is the honest answer.
    """
    if len(numerators) != len(denominators) or not numerators:
        raise ValueError("a paired ratio needs as many numerators as denominators, at least one")
    ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
    means = sorted(math.sqrt(a * b) for a, b in combinations_with_replacement(ratios, 2))
    rank = _signed_rank(len(ratios), CONFIDENCE)
    return Ratio(median(means), means[rank], means[-1 - rank], len(ratios))


def relative_spread(values: Sequence[float]) -> float:
    """Return how far repeated measurements of one thing lie apart: (max - min) / median."""
    centre = median(values) if values else 0.0
    return (max(values) - min(values)) / centre if centre else 0.0
