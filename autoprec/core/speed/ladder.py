"""Grows the batch until it no longer pays, before anything else is compared.

At a small batch a GPU waits for the host, which needs as long for every precision; which policy is
fastest shows only where the device is busy. A step of b samples takes about a + c * b seconds. Two
batches give a and c, and with them how far the throughput b / (a + c * b) is from its limit 1 / c.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoprec.core.speed.space import BATCH, Point
from autoprec.core.speed.stopping import Limits
from autoprec.core.speed.trial_results import Outcome

#: The first step up, while nothing is known of how the time of a step grows.
_FIRST_GROWTH = 4

#: A batch whose throughput is within this share of the limit is large enough.
ENOUGH = 0.97


def next_batch(larger: Sequence[Point], ran: Sequence[Outcome], limits: Limits) -> Point | None:
    """Return the point of the next larger batch to measure; None where the ladder ends.

    `larger` are the untried points that may run, `ran` what ran: they differ in their batches
    alone. It ends where a larger batch is predicted to bring less than 3 % or less than the seconds
    of its trial are worth, and where the loader is slower than the step. Batches whose trials are
    not cheap are not skipped.
    """
    top = max(ran, key=lambda outcome: int(outcome.point[BATCH]))
    above = sorted(larger, key=lambda point: int(point[BATCH]))
    above = [point for point in above if int(point[BATCH]) > int(top.point[BATCH])]
    wanted, gain = _wanted(ran, top)
    if not above or gain <= 0 or _waits_for_data(top):
        return None
    sizes = [int(point[BATCH]) for point in above]
    costs = {size: limits.trial_seconds(size / top.rate) for size in sizes}
    skipped = [size for size, cost in costs.items() if cost <= limits.cheap_seconds]
    enough = [size for size in costs if size >= wanted]
    size = min([*enough[:1], max([min(costs), *skipped])])
    worth = gain > limits.gain_per_second * costs[size]
    return next(point for point in above if int(point[BATCH]) == size) if worth else None


def smallest_of_fastest(ran: Sequence[Outcome]) -> Outcome:
    """Return the smallest batch whose throughput is within 3 % of the best."""
    best = max(outcome.rate for outcome in ran)
    enough = [outcome for outcome in ran if outcome.rate >= ENOUGH * best]
    return min(enough, key=lambda outcome: int(outcome.point[BATCH]))


def comparison_batch(leader: Outcome, start: Point, limits: Limits) -> int:
    """Return the batch at which policies are compared: the leader's, if its trial is cheap.

    A policy that is emulated takes a hundred times as long.
    """
    size, smallest = int(leader.point[BATCH]), int(start[BATCH])
    cheap = (limits.cheap_seconds - limits.setup_seconds) / limits.steps * leader.rate
    return max(min(size, smallest), min(size, int(cheap)))


def _wanted(ran: Sequence[Outcome], top: Outcome) -> tuple[float, float]:
    """Return the batch that is large enough, and what that brings, in log throughput."""
    size, best = int(top.point[BATCH]), max(outcome.rate for outcome in ran)
    below = [outcome for outcome in ran if int(outcome.point[BATCH]) < size]
    if not below:
        return _FIRST_GROWTH * size, math.log(_FIRST_GROWTH)
    under = max(below, key=lambda outcome: int(outcome.point[BATCH]))
    before, last = (int(outcome.point[BATCH]) / outcome.rate for outcome in (under, top))
    each = (last - before) / (size - int(under.point[BATCH]))
    if each <= 0:
        return math.inf, math.log(_FIRST_GROWTH)
    fixed = last - each * size
    wanted = ENOUGH / (1 - ENOUGH) * fixed / each
    return (wanted, math.log(ENOUGH / each / best)) if wanted > size else (wanted, 0.0)


def _waits_for_data(outcome: Outcome) -> bool:
    measured = outcome.measurement
    return measured is not None and measured.data_seconds > measured.step_seconds
