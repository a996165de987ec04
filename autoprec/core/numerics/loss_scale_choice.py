"""Chooses a float16 loss scale from how large and how small a task's gradients are.

The largest exponent e of a backward pass at scale 1 allows scales up to 2**(15 - e): float16's
largest finite number is just under 2**16. Below that the gradient's error is flat for many
octaves, so head-room costs nothing; above it steps are skipped. Nothing here trains.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoprec.core.codec import bounded
from autoprec.core.dtypes import DType
from autoprec.core.numerics.traces import ExponentHistogram
from autoprec.core.recipe import (
    DEFAULT_SCALE,
    GROWTH_INTERVAL,
    LARGEST_SCALE,
    SMALLEST_SCALE,
    LossScale,
)

HEADROOM_OCTAVES = 4
"""Octaves left below the largest safe scale, for batches and steps that were not observed.

The gradient's error is flat for 18 octaves and more below the largest safe scale: they are free.
"""

NEAR_LIMIT_OCTAVES = 6
"""Gradients at loss scale 1 within this many octaves of float16's largest number are near it."""

FLOOR_OCTAVES = 12
"""How far below the largest safe scale the floor is: what overflows there is rarely the scale's
fault."""

MIN_EXPONENT, DEFAULT_EXPONENT, MAX_EXPONENT = (
    round(math.log2(scale)) for scale in (SMALLEST_SCALE, DEFAULT_SCALE, LARGEST_SCALE)
)
"""Exponents that a scale may have; the default is used if nothing was measured."""

#: An exponent of two that a profile may hold: float64's lie well inside.
_MOST_EXPONENT = 2000

_STEPS_PER_SKIP = 1000
"""A scale that grew too far may cost at most one step in this many."""


@dataclass(frozen=True)
class ScaleEvidence:
    """The measurements behind the choice of a loss scale; all magnitudes are exponents of two.

    `largest_safe` is the largest scale at which nothing overflowed (None: not known); `underflow`
    the share of the gradient, weighted by each tensor's norm, that float16 loses at `exponent`.
    `overflow_exponent` is the scale at which a training that doubles it every step first skipped
    one (None: it never did), and `skips_per_overflow` how many steps in a row that cost. `note`
    says why nothing could be measured, empty if it could.
    """

    exponent: int = bounded(low=MIN_EXPONENT, high=MAX_EXPONENT)
    largest_safe: int | None = bounded(low=-_MOST_EXPONENT, high=_MOST_EXPONENT)
    largest_gradient: int | None = bounded(low=-_MOST_EXPONENT, high=_MOST_EXPONENT)
    smallest_gradient: int | None = bounded(low=-_MOST_EXPONENT, high=_MOST_EXPONENT)
    underflow: float = bounded(low=0.0, high=1.0)
    skipped_steps: int = 0
    steps: int = 0
    trials: int = 0
    batches: int = 0
    note: str = ""
    overflow_exponent: int | None = None
    skips_per_overflow: int = 0
    growth_interval: int = GROWTH_INTERVAL


def largest_safe_exponent(histogram: ExponentHistogram) -> int | None:
    """Return the largest k at which no tensor of the backward pass overflows at scale 2**k."""
    if histogram.largest is None:
        return None
    return DType.FLOAT16.limits.max_exponent - histogram.largest


def initial_exponent(histogram: ExponentHistogram, headroom: int = HEADROOM_OCTAVES) -> int:
    """Return the exponent to start from: the largest safe one less the head-room, within limits."""
    largest = largest_safe_exponent(histogram)
    if largest is None:
        return DEFAULT_EXPONENT
    return max(MIN_EXPONENT, min(MAX_EXPONENT, largest - headroom))


def underflow_share(histogram: ExponentHistogram, exponent: int) -> float:
    """Return the share of the gradient that float16 rounds to zero at loss scale 2**exponent.

    Each element counts by its magnitude: many tiny ones next to a large one are negligible.
    """
    limits = DType.FLOAT16.limits
    smallest = limits.min_exponent - limits.mantissa_bits
    exponents = {int(key): share for key, share in histogram.counts.items()}
    largest = max(exponents, default=0)
    masses = {e: share * 2.0 ** (e - largest) for e, share in exponents.items()}
    total = sum(masses.values())
    return sum(mass for e, mass in masses.items() if e + exponent < smallest) / (total or 1.0)


def scale_cost(skipped: float, lost: float) -> float:
    """Return the cost of a scale: the share of steps skipped plus that of the gradient lost."""
    return skipped + lost


def floor_exponent(largest_safe: int | None, exponent: int) -> int:
    """Return the exponent below which a scale is not halved any more."""
    base = largest_safe if largest_safe is not None else exponent + HEADROOM_OCTAVES
    return max(MIN_EXPONENT, min(exponent, base - FLOOR_OCTAVES))


def is_near_limit(scale: LossScale) -> bool:
    """Return whether a chosen scale implies gradients near float16's largest number at scale 1."""
    return scale.initial <= 2.0 ** (NEAR_LIMIT_OCTAVES - HEADROOM_OCTAVES)


def longest_streak(steps: Sequence[int]) -> int:
    """Return the length of the longest streak of consecutive steps."""
    longest = current = 0
    previous = None
    for step in sorted(steps):
        current = current + 1 if previous is not None and step == previous + 1 else 1
        longest, previous = max(longest, current), step
    return longest


def growth_interval(skips_per_overflow: int) -> int:
    """Return the usual interval, or a longer one if an overflow costs over two steps."""
    return max(GROWTH_INTERVAL, _STEPS_PER_SKIP * skips_per_overflow)


def recommended_scale(evidence: ScaleEvidence) -> LossScale:
    """Return the recipe's loss scale, dynamic from the chosen start."""
    return LossScale(
        mode="dynamic",
        initial=2.0**evidence.exponent,
        growth_interval=evidence.growth_interval,
        floor=2.0 ** floor_exponent(evidence.largest_safe, evidence.exponent),
    )


NEGLIGIBLE_UNDERFLOW_SHARE = 1e-3
"""A share of the gradient that may underflow without a further trial."""


def next_exponent(start: int, tried: Mapping[int, tuple[float, float]]) -> int | None:
    """Return the exponent to try next, or None if no further trial is worth it.

    `tried` holds for every exponent the share of steps that were skipped and the share of the
    gradient that was lost. Skipped steps mean that the scale is too large, lost gradient that it
    is too small; each further trial in one direction goes twice as far.
    """
    if not tried:
        return start
    stride = 2 ** len(tried)
    kept = [exponent for exponent, (skipped, _) in tried.items() if skipped == 0.0]
    if not kept:
        proposed = min(tried) - stride
    elif tried[max(kept)][1] > NEGLIGIBLE_UNDERFLOW_SHARE and max(kept) == max(tried):
        proposed = max(kept) + stride
    else:
        return None
    return proposed if MIN_EXPONENT <= proposed <= MAX_EXPONENT else None
