"""Decides which recipes race before any is proven, who runs another round, and what rounds tell.

The search times a recipe once, each at another moment, and machines drift by more than the fastest
recipes differ. So those that may be the fastest run again in alternation, next to the baseline. One
recipe that was slower than all others predict runs along, if there is one: another process may have
slowed it.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autoprec.core.recipe import Recipe
from autoprec.core.speed.assumptions import SPEED
from autoprec.core.speed.cost_model import Prediction
from autoprec.core.speed.noise import paired_ratio
from autoprec.core.speed.selection import Finalist, smallest_of_fastest
from autoprec.core.speed.space import BATCH, point_key
from autoprec.core.speed.trial_results import Outcome, possibly_disturbed


def find_contenders(
    history: Sequence[Outcome],
    allowed: Callable[[Outcome], bool],
    *,
    new_processes: bool,
    batch_share: float = SPEED.knee_share,
) -> tuple[Outcome, ...]:
    """Return the recipes of a search that race: the one to beat, then the others, fastest first.

    Those may beat it by enough for their seconds, at a larger batch by more than the `batch_share`
    that a smaller one may lose. `new_processes`: each round starts workers and opens sessions anew.
    """
    may_run = [outcome for outcome in history if outcome.rate > 0 and allowed(outcome)]
    if not may_run:
        return ()
    first = _one_to_beat(may_run, batch_share)
    worth = [
        each
        for each in sorted(may_run, key=lambda outcome: -outcome.rate)
        if each is not first and _is_worth_racing(each, first, batch_share, new_processes)
    ]
    found = [first, *worth][: SPEED.most_contenders]
    slowed = [each for each in possibly_disturbed(history) if each in may_run and each not in found]
    return (*found, *slowed[:1])


def _one_to_beat(may_run: Sequence[Outcome], batch_share: float) -> Outcome:
    """Return the fastest, where the knee is wanted of the smallest batch that may be the fastest.

    Single timings tell batches apart no better, and rounds and proof of a larger one take longer.
    """
    size = smallest_of_fastest(
        may_run,
        lambda outcome: outcome.rate,
        lambda outcome: outcome.loader_feeds,
        lambda outcome: int(outcome.point[BATCH]),
        share=1 - SPEED.may_be_fastest_share,
    )
    at_knee = [outcome for outcome in may_run if int(outcome.point[BATCH]) == size]
    among = at_knee if batch_share >= SPEED.knee_share else may_run
    return max(among, key=lambda outcome: outcome.rate)


def _is_worth_racing(
    outcome: Outcome, first: Outcome, batch_share: float, new_processes: bool
) -> bool:
    """Return whether this may beat the first by enough to be worth the fewest rounds."""
    measured = outcome.measurement
    assert measured is not None
    ready = measured.warmup_seconds + SPEED.worker_seconds
    turn = max(SPEED.turn_seconds, measured.step_seconds)
    rounds = SPEED.min_rounds
    seconds = rounds * turn + (rounds if new_processes else 1) * ready
    promised = Prediction(math.log(outcome.rate / first.rate), SPEED.search_ratio_error)
    least = batch_share if int(outcome.point[BATCH]) > int(first.point[BATCH]) else 0.0
    return promised.expected_gain(least) > SPEED.gain_per_second * seconds


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


def ranking(
    history: Sequence[Outcome],
    baseline: Outcome,
    contenders: Sequence[Outcome],
    finalists: Sequence[Finalist],
) -> tuple[Outcome, ...]:
    """Return the history, with everything that raced at its speed in the race.

    `finalists` are baseline and contenders. The contenders keep the mean of their rates in the
    search, so that they compare with what did not race; the baseline is not counted, for a
    disturbance of its single trial would make all that raced look better or worse than the rest.
    """
    leader = finalists[1 + find_leader([each.rates for each in finalists[1:]])]
    ratios = [
        math.log(paired_ratio(each.rates, leader.rates[: len(each.rates)]).ratio)
        for each in finalists
    ]
    known = [math.log(each.rate) for each in contenders]
    scale = (sum(known) - sum(ratios[1:])) / len(known)
    raced: Mapping[object, Outcome] = {
        point_key(outcome.point): _with_rate(outcome, math.exp(scale + ratio))
        for outcome, ratio in zip((baseline, *contenders), ratios, strict=True)
    }
    return tuple(raced.get(point_key(outcome.point), outcome) for outcome in history)


def known_finalist(
    recipe: Recipe, winner: Recipe, finalists: Sequence[Finalist]
) -> Finalist | None:
    """Return what a race told of a recipe, which is the winner or one to compare with it.

    Where it did not run, what another setting costs the winner at twice or half its batch stands
    for what it costs there. None where that did not run either.
    """
    raced = {each.recipe.key(): each for each in finalists}
    if recipe.key() in raced:
        return raced[recipe.key()]
    own = raced.get(winner.key())
    sizes = (2 * winner.batch_size, winner.batch_size // 2)
    for size in sizes if own is not None and recipe.batch_size == winner.batch_size else ():
        pair = [raced.get(replace(each, batch_size=size).key()) for each in (winner, recipe)]
        if own is not None and pair[0] is not None and pair[1] is not None:
            rounds = zip(own.rates, pair[0].rates, pair[1].rates, strict=False)
            return replace(own, recipe=recipe, rates=tuple(a * c / b for a, b, c in rounds))
    return None


def _with_rate(outcome: Outcome, rate: float) -> Outcome:
    """Return the outcome at another rate."""
    measured = outcome.measurement
    assert measured is not None
    longer = measured.samples_per_second / rate
    steps = {name: longer * getattr(measured, name) for name in ("step_seconds", "low", "high")}
    return replace(outcome, measurement=replace(measured, **steps))
