"""A race of recipes in alternation: who runs another round, and when it is over.

A round is worth its seconds while it may still change who wins. The logarithms of two recipes'
rates differ from round to round by noise; after n rounds their mean is known to s / sqrt(n), and k
further rounds move it by about s sqrt(k / (n (n + k))). What that is expected to gain over staying
with the present leader is the knowledge gradient (Frazier, Powell and Dayanik, "A
Knowledge-Gradient Policy for Sequential Information Collection", 2008), here of as many rounds
ahead as gain most per second. Who promises less than the price of its turns is out; the race is
over when the leader is alone. On a quiet machine that takes three rounds, on a noisy one as many as
the noise asks for, and of recipes whose steps take seconds fewer than of quick ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoprec.core.speed.cost_model import Prediction
from autoprec.core.statistics import paired_ratio

FEWEST = 3
"""Rounds before anybody is out: of fewer, a disturbed one may decide."""

TURN_SECONDS = 0.15
"""What a recipe's turn in a round takes, where its steps are not longer."""

PRICE = 1 / 7200
"""The gain in throughput for which a second is spent: two hours of training win it back."""

#: The noise of a round's ratio before any is known, which counts as much as so many rounds.
_NOISE, _WEIGHT = 0.03, 1.0

#: How many rounds ahead a gain may lie.
_AHEAD = (1, 2, 4, 8, 16)


def still_running(
    rates: Sequence[Sequence[float]], seconds: Sequence[float], price: float = PRICE
) -> tuple[int, ...]:
    """Who deserves another round, by number; nobody: the race is over.

    `rates` are everybody's in samples per second, round by round; who has fewer rounds than another
    is out. `seconds` is what each one's turn takes, `price` the gain expected of a second.
    """
    rounds = max(len(own) for own in rates)
    running = [index for index, own in enumerate(rates) if len(own) == rounds]
    if len(running) < 2:
        return ()
    if rounds < FEWEST:
        return tuple(running)
    of = leader(rates)
    behind = [index for index in running if index != of]
    means = {i: math.log(paired_ratio(rates[i], rates[of]).ratio) for i in behind}
    noise = _noise(
        [
            [math.log(a / b) - means[i] for a, b in zip(rates[i], rates[of], strict=True)]
            for i in behind
        ]
    )
    promising = []
    for index in behind:
        turn = seconds[index] + seconds[of] / len(behind)
        gains = (_gain(means[index], noise, rounds, ahead) / ahead for ahead in _AHEAD)
        if max(gains) > price * turn:
            promising.append(index)
    return tuple(sorted((of, *promising))) if promising else ()


def leader(rates: Sequence[Sequence[float]]) -> int:
    """The fastest of those that ran every round, by number."""
    rounds = max(len(own) for own in rates)
    running = [index for index, own in enumerate(rates) if len(own) == rounds]
    first = rates[running[0]]
    return max(running, key=lambda index: paired_ratio(rates[index], first).ratio)


def _noise(errors: Sequence[Sequence[float]]) -> float:
    """The deviation of a round's ratio, from what every round differs from its recipe's mean by."""
    squares = sum(error * error for own in errors for error in own)
    known = sum(len(own) - 1 for own in errors)
    return math.sqrt((_WEIGHT * _NOISE**2 + squares) / (_WEIGHT + known))


def _gain(mean: float, noise: float, rounds: int, ahead: int) -> float:
    """What so many rounds ahead are expected to gain, in log throughput."""
    moves = noise * math.sqrt(ahead / (rounds * (rounds + ahead)))
    return Prediction(mean, moves).expected_gain(0.0)
