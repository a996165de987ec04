"""Decides which recipes race before any is proven, and what the rounds tell.

The search times a recipe once, each at another moment, and machines drift by more than the fastest
recipes differ. So those that may be the fastest run again in alternation, next to the baseline. One
recipe that was slower than all others predict runs along, if there is one: another process may have
slowed it. How many rounds there are, `rounds` decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autoprec.core.recipe import Recipe
from autoprec.core.speed.assumptions import SPEED
from autoprec.core.speed.cost_model import Prediction
from autoprec.core.speed.noise import paired_ratio
from autoprec.core.speed.rounds import find_leader
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
    if own is None or recipe.batch_size != winner.batch_size:
        return None
    for size in (2 * winner.batch_size, winner.batch_size // 2):
        pair = [raced.get(replace(each, batch_size=size).key()) for each in (winner, recipe)]
        if pair[0] is not None and pair[1] is not None:
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
