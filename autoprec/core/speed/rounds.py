"""Decides how many turns a round of interleaved timing has, and when its rounds are enough.

Both end by how precisely something is known, never by which recipe leads: a test after every round
would find a gain where there is none. `python -m benchmarks.search.rounds` shows what the rules
cost and how often their intervals hold, on rounds that are drawn with noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoprec.core.ratio import Ratio
from autoprec.core.speed.assumptions import SPEED
from autoprec.core.speed.consistency import is_too_wide
from autoprec.core.speed.noise import is_sharp
from autoprec.core.statistics import median


def level_turns(turns: Sequence[Sequence[float]]) -> tuple[list[float], float]:
    """Return every recipe's log step time of a round, and how far its turns are off: a deviation.

    `turns` are the recipes' log step times, turn by turn. What slowed all recipes of a turn alike
    is taken out first (one step of Tukey's median polish, "Exploratory Data Analysis", 1977).
    """
    medians = [median(own) for own in turns]
    errors = zip(
        *([log - m for log in own] for m, own in zip(medians, turns, strict=True)), strict=True
    )
    slowed = [median(each) for each in errors]
    levelled = [[log - s for log, s in zip(own, slowed, strict=True)] for own in turns]
    levels = [median(own) for own in levelled]
    squares = sum((log - m) ** 2 for m, own in zip(levels, levelled, strict=True) for log in own)
    known, assumed = (len(slowed) - 1) * (len(turns) - 1), SPEED.assumed_rounds
    variance = (assumed * SPEED.round_deviation**2 + squares) / (assumed + known)
    return levels, math.sqrt(variance)


def turns_are_enough(turns: Sequence[Sequence[float]]) -> bool:
    """Return whether the turns so far tell a round's rates as well as a round needs.

    That is half as far off as rounds are assumed to be: more turns would narrow no interval of few
    rounds, for those count as if they differed by that much. How far turns are off, those of one
    recipe do not tell.
    """
    count = len(turns[0])
    return min(count, len(turns)) > 1 and level_turns(turns)[
        1
    ] <= SPEED.round_deviation / 2 * math.sqrt(count)


def rounds_are_enough(ratio: Ratio, rounds: int, *, early: bool, must_take: bool = False) -> bool:
    """Return whether more rounds of the choice over the baseline would change nothing.

    They end by the width of the interval, with `early` (on a CPU, where each costs new processes)
    before as many ran as were asked for. Whether it is surely faster is tested once, after so many:
    testing after every round would bias the result. What `must_take` is the choice in any case:
    that it is slower is enough.
    """
    if must_take and ratio.rounds >= SPEED.min_rounds and ratio.high < 1.0:
        return True
    if ratio.rounds < min(SPEED.min_rounds, rounds) or is_too_wide(ratio):
        return False
    known = is_sharp(ratio) or ratio.high < 1.0 + SPEED.min_gain
    if ratio.rounds < rounds:
        return known and early
    if known:
        return True
    return ratio.ratio <= 1.0 + SPEED.min_gain or (ratio.rounds == rounds and ratio.low > 1.0)
