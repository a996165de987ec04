"""Decides what counts as faster or slower where machines are noisy.

Recipes are compared in rounds, so that drift meets all of them alike. Ratios of two recipes in the
same rounds err to either side alike, whichever of the two was disturbed. From six rounds on their
intervals come from the signed ranks (Hodges and Lehmann, "Estimates of location based on rank
tests", 1963), which need a third fewer rounds than the median where errors are normal. Fewer rounds
have no such interval; Student's is theirs, with what is known of rounds elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations_with_replacement

from autoprec.core.ratio import Ratio
from autoprec.core.speed.assumptions import SPEED
from autoprec.core.statistics import CONFIDENCE, median, signed_rank, student_interval


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Return the pseudomedian of the rounds' ratios with its interval; round i pairs i-th values.

    It is the median of the geometric means of every two rounds' ratios.
    """
    if len(numerators) != len(denominators) or not numerators:
        raise ValueError("a paired ratio needs as many numerators as denominators, at least one")
    ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
    means = sorted(math.sqrt(a * b) for a, b in combinations_with_replacement(ratios, 2))
    if len(ratios) < SPEED.ranked_rounds:
        logs = [math.log(ratio) for ratio in ratios]
        factor = math.exp(student_interval(logs, SPEED.round_deviation, SPEED.assumed_rounds))
        middle = math.exp(median([math.log(mean) for mean in means]))
        return Ratio(middle, middle / factor, middle * factor, len(ratios))
    rank = signed_rank(len(ratios), CONFIDENCE)
    return Ratio(median(means), means[rank], means[-1 - rank], len(ratios))


def is_sharp(ratio: Ratio) -> bool:
    """Return whether a ratio is known well enough for what it is.

    That is to 4 %, to a quarter of it, or to half of it where that is narrow enough.
    """
    width, gain = math.log(ratio.high / ratio.low), abs(math.log(ratio.ratio))
    return width <= max(SPEED.sharp_width, gain / 4, min(gain / 2, SPEED.enough_width))


def is_faster(ratio: Ratio) -> bool:
    """Return whether a ratio shows a gain: beyond the noise, and worth recommending."""
    return ratio.low > 1.0 and ratio.ratio > 1.0 + SPEED.min_gain


def seems_disturbed(step_seconds: float, expected_seconds: float | None) -> bool:
    """Return whether a timing is slower than expected as if the machine had been disturbed.

    Or the expectation was wrong: only timing it again tells.
    """
    if not expected_seconds:
        return False
    least, most = SPEED.disturbed_ratio_range
    return least < step_seconds / expected_seconds < most


def relative_spread(values: Sequence[float]) -> float:
    """Return how far repeated measurements of one thing lie apart: (max - min) / median."""
    centre = median(values) if values else 0.0
    return (max(values) - min(values)) / centre if centre else 0.0
