"""Races recipes in alternation: selects who runs another round, and when the race is over.

A round is worth its seconds while it may still change who wins. The logarithms of two recipes'
rates differ from round to round by noise; after n rounds their mean is known to s / sqrt(n), and k
further rounds move it by about s sqrt(k / (n (n + k))). What that is expected to gain over staying
with the present leader is the knowledge gradient (Frazier, Powell and Dayanik, "A
Knowledge-Gradient Policy for Sequential Information Collection", 2008), here of as many rounds
ahead as gain most per second. A recipe that promises less than its turns cost is eliminated; the
race is over when the leader is alone. That takes three rounds on a quiet machine, more on a noisy
one, and fewer for recipes whose steps take seconds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoprec.core.speed.assumptions import SPEED
from autoprec.core.speed.cost_model import Prediction
from autoprec.core.speed.noise import paired_ratio


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
