"""Decides how many rounds of interleaved timing there are, and how many turns a round has.

In a race, a round is worth its seconds while it may still change who wins. The logarithms of two
recipes' rates differ from round to round by noise; after n rounds their mean is known to s /
sqrt(n), and k further rounds move it by about s sqrt(k / (n (n + k))). What that is expected to
gain over staying with the present leader is the knowledge gradient (Frazier, Powell and Dayanik, "A
Knowledge-Gradient Policy for Sequential Information Collection", 2008), here of as many rounds
ahead as gain most per second. A recipe that promises less than its turns cost is eliminated; the
race is over when the leader is alone. That takes three rounds on a quiet machine, more on a noisy
one, and fewer for recipes whose steps take seconds.

The rounds of a confirmation, and the turns of a round, end by how precisely something is known,
never by which recipe leads: a test after every round would find a gain where there is none. `python
-m benchmarks.search.rounds` shows what the rules cost and how often their intervals hold, on rounds
that are drawn with noise. What every rule assumes stands in `assumptions`: `min_rounds` and
`most_rounds` of a race, `ranked_rounds` of an interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import sub

from autoprec.core.ratio import Ratio
from autoprec.core.speed.assumptions import SPEED
from autoprec.core.speed.consistency import is_too_wide
from autoprec.core.speed.cost_model import Prediction
from autoprec.core.speed.noise import is_sharp, paired_ratio
from autoprec.core.statistics import median

CONFIRMATION_ROUNDS = SPEED.ranked_rounds
"""How many rounds a confirmation has unless the user asks for another number."""

# The race ----------------------------------------------------------------------------------------


def who_runs_on(rates: Sequence[Sequence[float]], round_seconds: float) -> tuple[int, ...]:
    """Return who runs another round, by number; empty when the race is over.

    `rates` are every rival's, round by round; the last round took `round_seconds`, most of it for
    all of them at once. So a recipe must promise enough for a share of the round that does not
    shrink with the number of those that run.
    """
    if max(map(len, rates)) < SPEED.min_rounds:
        return tuple(range(len(rates)))
    return select_contenders(rates, round_seconds / 2)


def select_contenders(rates: Sequence[Sequence[float]], turn_seconds: float) -> tuple[int, ...]:
    """Return who runs another round, by number; empty when the race is over.

    `rates` are every recipe's in samples per second, round by round; one with fewer rounds than
    another was eliminated. `turn_seconds` is the duration of each one's turn; those behind share
    the leader's.
    """
    rounds = max(len(own) for own in rates)
    running = [index for index, own in enumerate(rates) if len(own) == rounds]
    if len(running) < 2:
        return ()
    if rounds < SPEED.min_rounds:
        return tuple(running)
    first = find_leader(rates)
    behind = [index for index in running if index != first]
    means = {i: math.log(paired_ratio(rates[i], rates[first]).ratio) for i in behind}
    noise = _estimate_noise(
        [
            [math.log(a / b) - means[i] for a, b in zip(rates[i], rates[first], strict=True)]
            for i in behind
        ]
    )
    least = SPEED.gain_per_second * turn_seconds * (1.0 + 1.0 / len(behind))
    promising = []
    for index in behind:
        gains = (
            _knowledge_gradient(means[index], noise, rounds, ahead) / ahead
            for ahead in SPEED.look_ahead_rounds
        )
        if max(gains) > least:
            promising.append(index)
    return tuple(sorted((first, *promising))) if promising else ()


def find_leader(rates: Sequence[Sequence[float]]) -> int:
    """Return the fastest of those that ran every round, by number."""
    rounds = max(len(own) for own in rates)
    running = [index for index, own in enumerate(rates) if len(own) == rounds]
    first = rates[running[0]]
    return max(running, key=lambda index: paired_ratio(rates[index], first).ratio)


def _estimate_noise(errors: Sequence[Sequence[float]]) -> float:
    """Return the deviation of a round's ratio, given the rounds' deviations from their means."""
    squares = sum(error * error for own in errors for error in own)
    known = sum(len(own) - 1 for own in errors)
    assumed = SPEED.race_assumed_rounds
    return math.sqrt((assumed * SPEED.round_deviation**2 + squares) / (assumed + known))


def _knowledge_gradient(mean: float, noise: float, rounds: int, ahead: int) -> float:
    """Return the expected gain of further rounds, in log throughput."""
    moves = noise * math.sqrt(ahead / (rounds * (rounds + ahead)))
    return Prediction(mean, moves).expected_gain(0.0)


# The confirmation --------------------------------------------------------------------------------


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


def most_rounds(rounds: int) -> int:
    """Return after how many rounds a confirmation ends, where so many were asked for."""
    return 2 * rounds


# The turns of a round ----------------------------------------------------------------------------


def turns_worth(process_seconds: float, turn_seconds: float) -> int:
    """Return how many turns in a process tell most for their seconds.

    That is the square root of what the process takes over what a turn takes, times how much more
    turns differ than processes (Kalibera and Jones, "Rigorous benchmarking in reasonable time",
    2013).
    """
    worth = SPEED.turns_over_processes * math.sqrt(process_seconds / turn_seconds)
    return max(1, min(SPEED.most_turns, round(worth)))


def level_turns(turns: Sequence[Sequence[float]]) -> tuple[list[float], float]:
    """Return every recipe's log step time of a round, and how far its turns are off: a deviation.

    `turns` are the recipes' log step times, turn by turn. What slowed all recipes of a turn alike
    is taken out first (one step of Tukey's median polish, "Exploratory Data Analysis", 1977).
    """
    slowed = [median(each) for each in zip(*map(_from_median, turns), strict=True)]
    levelled = [list(map(sub, own, slowed)) for own in turns]
    levels = [median(own) for own in levelled]
    squares = sum(error**2 for own in map(_from_median, levelled) for error in own)
    known, assumed = (len(slowed) - 1) * (len(turns) - 1), SPEED.assumed_rounds
    variance = (assumed * SPEED.round_deviation**2 + squares) / (assumed + known)
    return levels, math.sqrt(variance)


def _from_median(values: Sequence[float]) -> list[float]:
    middle = median(values)
    return [value - middle for value in values]


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
