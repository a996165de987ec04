"""Decides whether measurements are consistent; if they are not, nothing is concluded from them.

Machines are noisy, and most of the noise is handled by interleaved rounds and their intervals. Here
it is checked whether that was enough. A step that another process disturbs takes
up to 65 % longer; numbers further apart than this mean that the machine changed in between, and a
recipe chosen by them would be chosen by luck.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autoprec.core.number_words import rate_number, times
from autoprec.core.ratio import Ratio
from autoprec.core.speed.assumptions import SPEED
from autoprec.core.statistics import median


@dataclass(frozen=True)
class RecipeRates:
    """A recipe's rates in the search and in the rounds, in samples per second, uncorrected."""

    name: str
    search: float
    rounds: tuple[float, ...]


def is_too_wide(ratio: Ratio) -> bool:
    """Return whether the interval is so wide, relative to the gain, that the gain means nothing.

    An interval below 1 is never too wide: the recipe is slower.
    """
    if ratio.low <= 0 or ratio.high < 1.0:
        return False
    width = math.log(ratio.high / ratio.low)
    return width > math.log(SPEED.wide_interval_factor) and width > abs(math.log(ratio.ratio))


def rate_changed(before: float, after: float) -> bool:
    """Return whether one recipe's two rates are about an order of magnitude apart."""
    return abs(math.log(before / after)) > math.log(SPEED.rate_change_factor)


def contradict(one: Ratio, other: Ratio) -> bool:
    """Return whether two measurements of one ratio lie too far apart for both to be right."""
    if min(one.low, other.low) <= 0:
        return False
    return max(one.low, other.low) > SPEED.contradiction_factor * min(one.high, other.high)


def overstated(raced: Ratio, confirmed: Ratio) -> str:
    """Say that a recipe's speedup in the race is gone in the final rounds; "" where it is not."""
    if math.log(raced.low / confirmed.high) <= SPEED.overstated_log_ratio:
        return ""
    return f"the comparison saw {raced.in_words()}, the final rounds {confirmed.in_words()}"


def find_inconsistencies(
    ratio: Ratio | None, searched: Ratio | None, rates: Sequence[RecipeRates]
) -> tuple[str, ...]:
    """Return why the ratio to the baseline cannot be trusted; empty where it can.

    `ratio` is that of the rounds, `searched` the same as the search saw it; None: there is none.
    """
    found = []
    for recipe in rates:
        after = median(recipe.rounds)
        if recipe.search > 0 and after > 0 and rate_changed(recipe.search, after):
            found.append(
                f"{recipe.name} ran at {rate_number(recipe.search)} samples/s in the search and at "
                f"{rate_number(after)} in the final rounds"
            )
    if ratio is None:
        return tuple(found)
    if searched is not None and contradict(ratio, searched):
        found.append(f"the search saw {times(searched.ratio)}, the final rounds {ratio.in_words()}")
    if is_too_wide(ratio):
        found.append(f"the final rounds saw {ratio.in_words()}, which may be anything")
    return tuple(found)
