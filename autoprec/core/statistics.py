"""Medians and the intervals of medians, which assume no normal distribution.

Step times are skewed: intervals of a median come from order statistics (the sign test), which hold
for any distribution.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache

CONFIDENCE = 0.95


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
def signed_rank(count: int, confidence: float) -> int:
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


#: Student's t: how many standard errors the 95 % interval of a mean reaches to either side, by the
#: degrees of freedom. From any table of it.
_STUDENT_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def student_interval(
    values: Sequence[float], assumed_deviation: float, assumed_values: int
) -> float:
    """Return the half width of the mean's 95 % interval for a few values that err normally.

    The deviation is estimated from the values and from `assumed_values` more, as it were, that were
    off by `assumed_deviation`: two values alone may agree by chance. At most ten are counted.
    """
    mean = sum(values) / len(values)
    squares = sum((value - mean) ** 2 for value in values)
    freedom = min(assumed_values + len(values) - 1, len(_STUDENT_95))
    variance = (assumed_values * assumed_deviation**2 + squares) / freedom
    return _STUDENT_95[freedom - 1] * math.sqrt(variance / len(values))


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Return the interval of the median from order statistics; with few values, the whole range.

    Fewer than 6 values cannot give 95 %: then the range is the honest answer.
    """
    if not values:
        raise ValueError("the interval of nothing is not defined")
    ordered = sorted(values)
    rank = _sign_rank(len(ordered), confidence)
    return ordered[rank], ordered[-1 - rank]
