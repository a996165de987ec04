"""Proposes the recipe to measure next, as a pure function of what was measured before.

No clock, no globals, no randomness: the same history gives the same proposal, so a resumed search
goes on where it stopped and a recorded grid can be replayed. The first point is the baseline, then
the baseline with its memory kept where that is possible (see `keep_memory`). Then its batch grows
while that pays (see `ladder`), and every other policy runs at the batch found: no model can guess
what a policy is worth on this machine, and at a small batch a device may be waiting whatever the
policy; float16 may have to wait for bfloat16 (see `float16`). The two best policies are tried
compiled, where that may be chosen. After that, the point with the largest expected improvement per
second of measuring is next, first among those that differ from the fastest in one thing alone,
until none is worth a trial (see `stopping`). Batches grow at most eightfold from one that ran, so
that memory and step time are never extrapolated far. Since libraries change kernels at some batch,
and a compiler may lose what a policy gains, the search ends only when the recipes next to the
fastest one were tried. A rate well below the model's prediction gets little weight: another process
may have slowed it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoprec.core.dtypes import Policy
from autoprec.core.recipe import (
    BLOCKS,
    COMPILE_MODE,
    COMPILE_SCOPE,
    FLOAT8,
    GRAPH_MODES,
    KEEP_MEMORY,
    KnobValue,
)
from autoprec.core.speed.communication import communication_may_pay
from autoprec.core.speed.cost_model import (
    MAJOR_FACTORS,
    Prediction,
    ThroughputModel,
)
from autoprec.core.speed.feasibility import (
    BATCH_TOO_LARGE,
    in_time,
    is_within_reach,
    outpaces_loader,
    same_arm,
    saves_no_calls,
    why_ruled_out,
)
from autoprec.core.speed.float16 import float16_waits
from autoprec.core.speed.keep_memory import start_point
from autoprec.core.speed.ladder import (
    comparison_batch,
    next_batch,
    outgrows_knee,
    smallest_of_fastest,
)
from autoprec.core.speed.space import BATCH, Point, Space, point_key
from autoprec.core.speed.stopping import (
    ALL_MEASURED,
    OUT_OF_TIME,
    Limits,
    Stop,
    is_worth_a_trial,
    nothing_worth_a_trial,
    trial_limit_reached,
)
from autoprec.core.speed.trial_results import Outcome, fit_model

#: By how much, as a logarithm, a library's other kernels may exceed the model's prediction.
_KERNEL_CHANGE_LOG_GAIN = 0.35

#: A recipe between measured ones is skipped if it is slower by this many standard deviations.
_CLEARLY_SLOWER_DEVIATIONS = 3.0

#: How many policies, the fastest first, are tried compiled before anything else is refined.
_COMPILED_POLICIES = 2

#: A compiler that leaves less than this share of a policy's speed is not tried under the next one.
_LOST_BY_COMPILING = 0.75

#: Trials of a factor's other level may take this many times longer than `Limits.cheap_seconds`,
#: because what the model predicts there is a guess.
_OTHER_LEVEL_COST_FACTOR = 2.0


@dataclass(frozen=True)
class Next:
    """The point to measure next (None: wherever a sampler says), and why.

    `expected_rate` is the cost model's prediction in samples per second, where that is near the
    fastest measured; 0 elsewhere.
    """

    point: Point | None
    reason: str
    expected_rate: float = 0.0


def next_point(
    space: Space, baseline: Point, history: Sequence[Outcome], limits: Limits
) -> Next | Stop:
    """Propose the next point to measure whose trial ends in time, or say why to stop.

    It is for lack of time only where without that limit another trial would be worth it.
    """
    decision = _next_in_time(space, baseline, history, limits)
    if isinstance(decision, Next) or math.isinf(limits.seconds_left):
        return decision
    unlimited = replace(limits, seconds_left=math.inf)
    wanted = _next_in_time(space, baseline, history, unlimited)
    return OUT_OF_TIME if isinstance(wanted, Next) else decision


def _next_in_time(
    space: Space, baseline: Point, history: Sequence[Outcome], limits: Limits
) -> Next | Stop:
    if all(point_key(outcome.point) != point_key(baseline) for outcome in history):
        return Next(baseline, "the baseline")
    if stop := trial_limit_reached(len(history), limits):
        return stop
    tried = {point_key(outcome.point) for outcome in history}
    start = start_point(space, baseline, history)
    if point_key(start) not in tried:
        kept = Next(start, "the baseline with its freed memory kept")
        return kept if in_time([start], history, limits) else OUT_OF_TIME
    compiler_fails, waits = _compiler_fails(history), float16_waits(space, history)
    open_points = [
        point
        for point in space.points()
        if point_key(point) not in tried
        and point.get(KEEP_MEMORY) == start.get(KEEP_MEMORY)
        and communication_may_pay(point, baseline, history)
        and _what_it_refines_ran(point, history)
        and not (compiler_fails and point["compile"])
        and not (waits and point["policy"] == Policy.MIXED_FLOAT16.value)
        and is_within_reach(point, history)
        and not outpaces_loader(point, history)
        and not saves_no_calls(point, baseline, history)
        and not why_ruled_out(point, history, limits.memory_bytes)
    ]
    open_points = in_time(open_points, history, limits)
    if not open_points:
        return ALL_MEASURED
    good = [outcome for outcome in history if outcome.rate > 0]
    if not good:
        return Next(_smallest(open_points), "nothing has run yet; the smallest batch next")
    surveyed = _next_of_survey(open_points, history, start, limits)
    if surveyed is not None:
        return surveyed
    tried_policies = {outcome.point["policy"] for outcome in history}
    open_points = [
        point
        for point in open_points
        if point["policy"] in tried_policies and not outgrows_knee(point, good, limits)
    ]
    compiled = _best_policy_compiled(open_points, good)
    if compiled is not None:
        return compiled
    fastest = max(good, key=lambda outcome: outcome.rate)
    near = [point for point in open_points if _one_factor_differs(point, fastest.point)]
    for candidates in (near, open_points):
        decision = _most_promising(candidates, good, limits, space.batch_share)
        if isinstance(decision, Next):
            return decision
    return _neighbour_of_fastest(space, open_points, good, limits) or decision


def _next_of_survey(
    open_points: Sequence[Point], history: Sequence[Outcome], start: Point, limits: Limits
) -> Next | None:
    """Return the next larger batch while those pay, then that batch under each other policy."""
    good = [outcome for outcome in history if outcome.rate > 0]
    known = {o.point["policy"] for o in history if o.status not in BATCH_TOO_LARGE}
    unknown = {point["policy"] for point in open_points} - known
    if not unknown:
        return None
    ran = [outcome for outcome in good if same_arm(outcome.point, start)] or good
    rung = next_batch([p for p in open_points if same_arm(p, start)], ran, limits)
    if rung is not None:
        return Next(rung, "a larger batch")
    leader = smallest_of_fastest(ran)
    size = comparison_batch(leader, start, limits)
    firsts = [
        point
        for point in open_points
        if point["policy"] in unknown
        and int(point[BATCH]) <= size
        and same_arm({**point, "policy": leader.point["policy"]}, leader.point)
    ]
    if not firsts:
        return None
    first = max(firsts, key=lambda point: int(point[BATCH]))
    return Next(first, f"batch {first[BATCH]} under another policy", leader.rate)


def _best_policy_compiled(open_points: Sequence[Point], good: Sequence[Outcome]) -> Next | None:
    """Return the fastest recipe of the two best policies compiled, where that was not tried.

    Of the second one only if the compiler did not take much of the first one's speed. Of equal
    blocks one is compiled for all, which takes a part of the seconds; the whole model comes later.
    """
    fastest: dict[tuple[object, object], Outcome] = {}
    for outcome in sorted(good, key=lambda outcome: -outcome.rate):
        fastest.setdefault((outcome.point["policy"], outcome.point["compile"]), outcome)
    eager = [(policy, each) for (policy, compiled), each in fastest.items() if not compiled]
    for policy, outcome in eager[:_COMPILED_POLICIES]:
        known = fastest.get((policy, True))
        if known is not None and known.rate < _LOST_BY_COMPILING * outcome.rate:
            return None
        compiled = {**outcome.point, "compile": True}
        ways = [{**compiled, COMPILE_SCOPE: BLOCKS}, compiled]
        left = [way for way in ways if any(point == way for point in open_points)]
        if known is None and left:
            return Next(left[0], "the fastest of its policy, compiled", outcome.rate)
    return None


def _compiler_fails(history: Sequence[Outcome]) -> bool:
    """Return whether no compiled recipe ran, and those of as many policies as are tried failed."""
    compiled = [outcome for outcome in history if outcome.point["compile"]]
    policies = {o.point["policy"] for o in compiled if o.status not in BATCH_TOO_LARGE}
    return all(o.rate <= 0 for o in compiled) and len(policies) >= _COMPILED_POLICIES


def _one_factor_differs(point: Point, fastest: Point) -> bool:
    """Return whether two points differ in one factor alone, the batch being one, too."""
    return sum(point[name] != value for name, value in fastest.items()) == 1


def _neighbour_of_fastest(
    space: Space, open_points: Sequence[Point], good: Sequence[Outcome], limits: Limits
) -> Next | None:
    """Return an untried recipe near the fastest one that the model cannot predict well enough.

    Libraries change their kernels at some batch: so an untried batch next to the fastest recipe's,
    or one that is nearly as fast and lies between tried ones or is the largest of all. Factors
    interact (a compiler may lose what a policy gains): so the fastest recipe with one factor
    changed, also at another batch if that level ran only once. Only trials that take a few seconds
    are spent this way.
    """
    fastest = max(good, key=lambda outcome: outcome.rate)
    model = fit_model(good)
    sizes = space.batch_sizes
    position = sizes.index(int(fastest.point[BATCH]))
    ran = [int(o.point[BATCH]) for o in good]
    tried = _sizes_run(fastest.point, good)
    found = []
    for point in open_points:
        prediction = model.predict(point)
        cost = _cost(point, prediction, limits)
        size = int(point[BATCH])
        if same_arm(point, fastest.point):
            if size in tried:  # with other knobs, which do not change kernels
                continue
            close = prediction.mean > math.log(fastest.rate) - _KERNEL_CHANGE_LOG_GAIN
            wide = close and (min(ran) < size < max(ran) or size == sizes[-1])
            adjacent = abs(sizes.index(size) - position) == 1
            worth_a_trial = (adjacent or wide) and cost <= limits.cheap_seconds
        else:
            at_most = prediction.mean + _CLEARLY_SLOWER_DEVIATIONS * prediction.deviation
            known = at_most < math.log(fastest.rate) and _is_between_measured(point, good)
            other = _is_one_factor_away(point, fastest.point, open_points, good)
            other = other or _level_measured_once(point, fastest.point, good)
            cheap = cost <= _OTHER_LEVEL_COST_FACTOR * limits.cheap_seconds
            worth_a_trial = other and not known and cheap
        if worth_a_trial:
            found.append((round(prediction.mean, 9), point))  # the first of equals
    if not found:
        return None
    point = max(found, key=lambda item: item[0])[1]
    return Next(point, "next to the fastest", _expected_rate(model, point, math.log(fastest.rate)))


def _is_one_factor_away(
    point: Point, fastest: Point, open_points: Sequence[Point], good: Sequence[Outcome]
) -> bool:
    """Return whether this is the fastest recipe with one factor changed, or a step towards it.

    The other level may have run only at small batches: then its largest batch within reach counts.
    """
    if _changed_factor(point, fastest) is None:
        return False
    size, wanted = int(point[BATCH]), int(fastest[BATCH])
    untried = [int(p[BATCH]) for p in open_points if same_arm(p, point) and int(p[BATCH]) <= wanted]
    ran = _sizes_run(point, good)
    return size == max(untried, default=0) and (size == wanted or size > max(ran, default=0))


def _level_measured_once(point: Point, fastest: Point, good: Sequence[Outcome]) -> bool:
    """Return whether this differs from the fastest in one factor whose level ran only once.

    The batch may differ, too. A single measurement may have been disturbed.
    """
    name = _changed_factor(point, fastest)
    return name is not None and sum(o.point[name] == point[name] for o in good) == 1


def _changed_factor(point: Point, fastest: Point) -> str | None:
    """Return the only factor in which two points differ, whatever their batches; else None."""
    changed = [name for name, value in fastest.items() if name != BATCH and point[name] != value]
    return changed[0] if len(changed) == 1 and changed[0] in MAJOR_FACTORS else None


def _sizes_run(point: Point, good: Sequence[Outcome]) -> set[int]:
    """Return the batches that ran with the same kernels."""
    return {int(o.point[BATCH]) for o in good if _same_kernels(o.point, point)}


def _is_between_measured(point: Point, good: Sequence[Outcome]) -> bool:
    """Return whether smaller and larger batches than this ran with the same kernels."""
    ran = _sizes_run(point, good)
    return min(ran, default=0) < int(point[BATCH]) < max(ran, default=0)


def _what_it_refines_ran(point: Point, history: Sequence[Outcome]) -> bool:
    """Return whether what float8 or CUDA graphs refine at a point has run, at any batch."""
    refined: dict[str, KnobValue] = {FLOAT8: False} if point.get(FLOAT8) else {}
    if point.get(COMPILE_MODE) in GRAPH_MODES:
        refined[COMPILE_MODE] = "default"
    coarse = {**point, **refined}
    ran = (o for o in history if o.rate > 0)
    return not refined or any(same_arm(outcome.point, coarse) for outcome in ran)


def _most_promising(
    open_points: Sequence[Point], good: Sequence[Outcome], limits: Limits, batch_share: float
) -> Next | Stop:
    """Return the point of the largest expected gain per second, or that none is worth a trial.

    A gain is over what the model takes the fastest to be: the fastest measured was lucky, too. A
    batch larger than the fastest one's gains only what lies beyond `batch_share`.
    """
    model = fit_model(good)
    fastest = max(good, key=lambda outcome: model.predict(outcome.point).mean)
    best = model.predict(fastest.point).mean
    ranked = []
    for point in open_points:
        prediction = model.predict(point)
        larger = int(point[BATCH]) > int(fastest.point[BATCH])
        least = best + (batch_share if larger else 0.0)
        gain, cost = prediction.expected_gain(least), _cost(point, prediction, limits)
        if cost > limits.cheap_seconds and _skips_smaller_batch(point, open_points, good):
            continue
        if is_worth_a_trial(prediction, cost, least, limits):
            ranked.append((gain / cost, gain, point))
    if not ranked:
        return nothing_worth_a_trial(limits)
    _, gain, point = max(ranked, key=lambda item: item[0])  # the first of equals
    return Next(point, f"expected gain {math.expm1(gain):.1%}", _expected_rate(model, point, best))


def _expected_rate(model: ThroughputModel, point: Point, best: float) -> float:
    """Return the rate to expect at a point that may be chosen; 0 for one that is much slower."""
    mean = model.predict(point).mean
    return math.exp(mean) if mean > best - _KERNEL_CHANGE_LOG_GAIN else 0.0


def _skips_smaller_batch(
    point: Point, open_points: Sequence[Point], good: Sequence[Outcome]
) -> bool:
    """Return whether an untried smaller batch exceeds all that ran with these kernels."""
    ran, size = max(_sizes_run(point, good), default=0), int(point[BATCH])
    return any(ran < int(other[BATCH]) < size and same_arm(other, point) for other in open_points)


def _cost(point: Point, prediction: Prediction, limits: Limits) -> float:
    """Return the seconds of a trial: its setup and its steps at the predicted throughput."""
    return limits.trial_seconds(float(point[BATCH]) / math.exp(prediction.mean))


def _smallest(points: Sequence[Point]) -> Point:
    return min(points, key=lambda point: int(point[BATCH]))


def _same_kernels(left: Point, right: Point) -> bool:
    """Return whether two points use the same kernels, which further knobs hardly change."""
    return all(left[name] == right[name] for name in MAJOR_FACTORS if name in left)
