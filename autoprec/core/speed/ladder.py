"""Grows the batch until it no longer pays, before anything else is compared.

At a small batch a GPU waits for the host, which needs as long for every precision; which policy is
fastest shows only where the device is busy. A step of b samples takes about a + c * b seconds. Two
batches give a and c, and with them how far the throughput b / (a + c * b) is from its limit 1 / c.
So it is with the loader, which may be slower than the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from autoprec.core.speed.assumptions import SPEED
from autoprec.core.speed.selection import smallest_of_fastest as smallest_batch
from autoprec.core.speed.space import BATCH, Point
from autoprec.core.speed.stopping import Limits
from autoprec.core.speed.trial_results import Outcome

#: The first step up, while nothing is known of how the time of a step grows.
_FIRST_GROWTH = 4

#: Up to this batch, which ends the grids that the search was checked against (benchmarks/curves/),
#: the cost model alone says what is worth a trial. It always hopes for a little more beyond.
_CHECKED_BATCH = 1024

#: How many times the knee a larger batch may be that is tried in case its kernels are others.
_MOST_KNEES = 16

#: A batch whose throughput is within this share of the limit is large enough.
ENOUGH = 0.97


def next_batch(larger: Sequence[Point], ran: Sequence[Outcome], limits: Limits) -> Point | None:
    """Return the point of the next larger batch to measure; None where the ladder ends.

    `larger` are the untried points that may run, `ran` what ran: they differ in their batches
    alone. It ends where a larger batch is predicted to bring less than 3 % or less than the seconds
    of its trial are worth, be it for the step or for the loader. Batches whose trials are not cheap
    are not skipped.
    """
    top = max(ran, key=lambda outcome: int(outcome.point[BATCH]))
    above = sorted(larger, key=lambda point: int(point[BATCH]))
    above = [point for point in above if int(point[BATCH]) > int(top.point[BATCH])]
    wanted, gain = _wanted(ran, top, lambda outcome: outcome.rate)
    if top.loader_feeds < top.rate:
        fed, fed_gain = _wanted(ran, top, lambda outcome: outcome.loader_feeds)
        wanted, gain = min(wanted, fed), min(gain, fed_gain)
    if not above or gain <= 0:
        return None
    sizes = [int(point[BATCH]) for point in above]
    costs = {size: limits.trial_seconds(size / top.rate) for size in sizes}
    skipped = [size for size, cost in costs.items() if cost <= limits.cheap_seconds]
    enough = [size for size in costs if size >= wanted]
    size = min([*enough[:1], max([min(costs), *skipped])])
    worth = gain > limits.gain_per_second * costs[size]
    return next(point for point in above if int(point[BATCH]) == size) if worth else None


def smallest_of_fastest(ran: Sequence[Outcome]) -> Outcome:
    """Return the smallest batch whose throughput is within 3 % of the best that is fed."""
    smallest = smallest_batch(
        ran,
        lambda outcome: outcome.rate,
        lambda outcome: outcome.loader_feeds,
        lambda outcome: int(outcome.point[BATCH]),
        share=1 - ENOUGH,
    )
    return next(outcome for outcome in ran if int(outcome.point[BATCH]) == smallest)


def knee_of(history: Sequence[Outcome], policy: str) -> int | None:
    """Return the smallest batch at which a policy is nearly as fast as at any; None at one only."""
    ran = [o for o in history if o.rate > 0 and o.point["policy"] == policy]
    fastest: dict[int, Outcome] = {}
    for outcome in sorted(ran, key=lambda outcome: outcome.rate):
        fastest[int(outcome.point[BATCH])] = outcome
    if len(fastest) < 2:
        return None
    return smallest_batch(
        tuple(fastest.values()),
        lambda outcome: outcome.rate,
        lambda outcome: outcome.loader_feeds,
        lambda outcome: int(outcome.point[BATCH]),
        share=SPEED.knee_share,
    )


def largest_that_ran(history: Sequence[Outcome]) -> int:
    """Return the largest batch of a trial that ran; one did at least."""
    return max(int(outcome.point[BATCH]) for outcome in history if outcome.rate > 0)


def outgrows_knee(point: Point, ran: Sequence[Outcome], limits: Limits) -> bool:
    """Return whether a batch is larger than all that ran, and its policy gained no more there.

    Libraries change their kernels at some batch, so that up to sixteen times the knee is looked at
    where that is cheap.
    """
    own = [outcome for outcome in ran if outcome.point["policy"] == point["policy"]]
    knee, size = knee_of(own, str(point["policy"])), int(point[BATCH])
    if knee is None or knee == largest_that_ran(own) or size <= largest_that_ran(ran):
        return False
    if size <= _CHECKED_BATCH:
        return False
    seconds = size / max(outcome.rate for outcome in own)
    return size > _MOST_KNEES * knee or limits.trial_seconds(seconds) > limits.cheap_seconds


def comparison_batch(leader: Outcome, start: Point, limits: Limits) -> int:
    """Return the batch at which policies are compared: the leader's, if its trial is cheap.

    A policy that is emulated takes a hundred times as long.
    """
    size, smallest = int(leader.point[BATCH]), int(start[BATCH])
    cheap = (limits.cheap_seconds - limits.setup_seconds) / limits.steps * leader.rate
    return max(min(size, smallest), min(size, int(cheap)))


def _wanted(
    ran: Sequence[Outcome], top: Outcome, rate: Callable[[Outcome], float]
) -> tuple[float, float]:
    """Return the batch that is large enough, and what that brings, in log throughput.

    `rate` is the step's, or the loader's; the other is taken for no limit at larger batches.
    """
    size, best = int(top.point[BATCH]), max(min(o.rate, o.loader_feeds) for o in ran)
    below = [outcome for outcome in ran if int(outcome.point[BATCH]) < size]
    if not below:
        return _FIRST_GROWTH * size, math.log(_FIRST_GROWTH)
    under = max(below, key=lambda outcome: int(outcome.point[BATCH]))
    before, last = (int(outcome.point[BATCH]) / rate(outcome) for outcome in (under, top))
    each = (last - before) / (size - int(under.point[BATCH]))
    if each <= 0:
        return math.inf, math.log(_FIRST_GROWTH)
    fixed = last - each * size
    wanted = ENOUGH / (1 - ENOUGH) * fixed / each
    return (wanted, math.log(ENOUGH / each / best)) if wanted > size else (wanted, 0.0)
