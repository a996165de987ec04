"""The search: which recipe to measure next, as a pure function of what was measured before.

No clock, no globals, no randomness: the same history gives the same proposal, so a resumed search
goes on where it stopped and a recorded grid can be replayed. The first point is the baseline, where
it can be with its memory kept too (see `kept_memory`), the next are the baseline under every
other policy: no model can guess what a policy is worth on this machine. After them, the point with
the most expected improvement per second of measuring is next, until no point is likely to improve
by more than one per cent. Batches grow at most eightfold from one that ran, so that memory and step
time are never guessed from afar; and since libraries change their kernels at some batch, and a
compiler may lose what a policy wins, the search ends only when the recipes beside the fastest one
were tried. What was slower than all others foresee weighs little: a neighbour may have slowed it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoprec.core.recipe import KEEP_MEMORY
from autoprec.core.speed.cost_model import (
    FACTORS,
    MemorySeen,
    Prediction,
    ThroughputModel,
    predict_memory,
)
from autoprec.core.speed.kept_memory import start_point
from autoprec.core.speed.space import ALIGNMENT, BATCH, Point, Space
from autoprec.core.speed.trial_results import Outcome, Status, key, seen, suspects

#: Ends that say that every larger batch of the same arm ends so too, however it is padded.
_GROWS_WORSE = (Status.OUT_OF_MEMORY, Status.WOULD_NOT_FIT, Status.TIMEOUT, Status.KILLED)


#: How much larger a batch may be than the largest that ran.
_REACH = 8

#: By how much, as a logarithm, a library's other kernels may beat what the model expects.
_CLIFF = 0.35

#: Standard deviations by which a recipe between measured ones must be slower not to be tried.
_SURE = 3.0

#: How far off as a logarithm a measurement in doubt may be.
_DOUBT = 0.3

#: A factor's other level may cost so many times more: what the model expects of it is a guess.
_DEAR = 2.0


#: Ends that say that the batch is too big for this machine.
_TOO_BIG = (Status.OUT_OF_MEMORY, Status.WOULD_NOT_FIT, Status.KILLED)


@dataclass(frozen=True)
class Limits:
    """What bounds the search: memory in bytes, trials, and when a gain is too small to look for.

    `setup_seconds` is the cost of a trial besides its steps, which it times for `timed_seconds`,
    and for `steps` steps with the warm-up at least. A trial must promise an expected gain of
    `gain_per_second` for every second that it takes; trials of up to `cheap_seconds` are spent on
    what the model cannot know, unless there are to be no `doubts`.
    """

    memory_bytes: float | None = None
    trials: int | None = None
    gain: float = 0.01
    doubt: float = 1.3
    setup_seconds: float = 0.5
    timed_seconds: float = 0.5
    steps: int = 4
    gain_per_second: float = 5e-4
    cheap_seconds: float = 3.0
    doubts: bool = True


@dataclass(frozen=True)
class Next:
    """The point to measure next (None: wherever a sampler says), and why.

    `foreseen` is the rate in samples per second that the cost model expects there, where it is
    near the fastest seen; 0 elsewhere.
    """

    point: Point | None
    reason: str
    foreseen: float = 0.0


@dataclass(frozen=True)
class Stop:
    """No further point is worth its time, and why."""

    reason: str


def next_point(
    space: Space, baseline: Point, history: Sequence[Outcome], limits: Limits
) -> Next | Stop:
    """Propose the next point to measure, or say why to stop."""
    if all(key(outcome.point) != key(baseline) for outcome in history):
        return Next(baseline, "the baseline")
    if limits.trials is not None and len(history) >= limits.trials:
        return Stop(f"the limit of {limits.trials} trials is reached")
    tried = {key(outcome.point) for outcome in history}
    start = start_point(space, baseline, history)
    if key(start) not in tried:
        return Next(start, "the baseline with its freed memory kept")
    known = {outcome.point["policy"] for outcome in history}
    open_points = [
        point
        for point in space.points()
        if key(point) not in tried
        and point.get(KEEP_MEMORY) == start.get(KEEP_MEMORY)
        and (point["policy"] in known or _first_of_policy(point, start))
        and _within_reach(point, history)
        and not ruled_out(point, history, limits)
    ]
    if not open_points:
        return Stop("every point that fits has been measured")
    good = [outcome for outcome in history if outcome.rate > 0]
    if not good:
        return Next(_smallest(open_points), "nothing has run yet; the smallest batch next")
    firsts = [point for point in open_points if point["policy"] not in known]
    if firsts:
        alike = next((o.rate for o in good if key(o.point) == key(start)), 0.0)
        return Next(firsts[0], "the baseline under another policy", alike)
    decision = _most_promising(open_points, good, limits)
    if isinstance(decision, Stop) and limits.doubts:
        return _unsure(space, open_points, good, limits) or decision
    return decision


def settled_baseline(space: Space, baseline: Point, history: Sequence[Outcome]) -> Point | None:
    """The baseline, or where it does not fit the largest smaller batch that does.

    None where plain float32 fails in another way, or at every batch. A point that was not tried yet
    is taken for one that runs.
    """
    ended = {key(outcome.point): outcome for outcome in history}
    sizes = sorted((s for s in space.batch_sizes if s <= int(baseline[BATCH])), reverse=True)
    for size in sizes:
        point = {**baseline, BATCH: size}
        outcome = ended.get(key(point))
        if outcome is None or outcome.rate > 0:
            return point
        if outcome.status not in _TOO_BIG:
            return None
    return None


def _within_reach(point: Point, history: Sequence[Outcome]) -> bool:
    """Whether a batch is at most eight times one that ran, of the same policy if there is one."""
    good = [outcome.point for outcome in history if outcome.rate > 0]
    own = [other for other in good if other["policy"] == point["policy"]]
    largest = max((int(other[BATCH]) for other in own or good), default=int(point[BATCH]))
    return int(point[BATCH]) <= _REACH * largest


def _unsure(
    space: Space, open_points: Sequence[Point], good: Sequence[Outcome], limits: Limits
) -> Next | None:
    """An untried recipe near the fastest one, of which no model can know enough.

    Libraries change their kernels at some batch: an untried batch beside the fastest recipe's, or
    nearly as fast and between tried ones or the largest of all. Factors work on each other (a
    compiler may lose what a policy wins): the fastest recipe with one factor changed, also at
    another batch where that level ran once only. Only trials that take a few seconds are spent on
    these doubts.
    """
    fastest = max(good, key=lambda outcome: outcome.rate)
    model = _model(good)
    sizes = space.batch_sizes
    at = sizes.index(int(fastest.point[BATCH]))
    ran = [int(o.point[BATCH]) for o in good]
    tried = _sizes_run(fastest.point, good)
    found = []
    for point in open_points:
        prediction = model.predict(point)
        cost = _cost(point, prediction, limits)
        size = int(point[BATCH])
        if _same_arm(point, fastest.point):
            if size in tried:  # with other knobs, which move no cliff
                continue
            near = prediction.mean > math.log(fastest.rate) - _CLIFF
            far = near and (min(ran) < size < max(ran) or size == sizes[-1])
            beside = abs(sizes.index(size) - at) == 1
            doubtful = (beside or far) and cost <= limits.cheap_seconds
        else:
            slower = prediction.mean + _SURE * prediction.deviation < math.log(fastest.rate)
            known = slower and _surrounded(point, good)
            other = _one_factor_away(point, fastest.point, open_points, good)
            other = other or _measured_once(point, fastest.point, good)
            doubtful = other and not known and cost <= _DEAR * limits.cheap_seconds
        if doubtful:
            found.append((prediction.mean, point))
    if not found:
        return None
    point = max(found, key=lambda item: item[0])[1]
    return Next(point, "beside the fastest", _foreseen(model, point, math.log(fastest.rate)))


def _one_factor_away(
    point: Point, fastest: Point, open_points: Sequence[Point], good: Sequence[Outcome]
) -> bool:
    """Whether this is the fastest recipe with one factor changed, or a step towards it.

    The other level may have run at small batches only: then its largest batch within reach.
    """
    if _changed_factor(point, fastest) is None:
        return False
    size, wanted = int(point[BATCH]), int(fastest[BATCH])
    left = [int(p[BATCH]) for p in open_points if _same_arm(p, point) and int(p[BATCH]) <= wanted]
    ran = _sizes_run(point, good)
    return size == max(left, default=0) and (size == wanted or size > max(ran, default=0))


def _measured_once(point: Point, fastest: Point, good: Sequence[Outcome]) -> bool:
    """Whether this is the fastest recipe's twin, at any batch, at a level of which little is known.

    What was measured once, at whatever batch, may have been disturbed then.
    """
    name = _changed_factor(point, fastest)
    return name is not None and sum(o.point[name] == point[name] for o in good) == 1


def _changed_factor(point: Point, fastest: Point) -> str | None:
    """The factor that alone tells two points apart, whatever their batches; None: not one alone."""
    changed = [name for name, value in fastest.items() if name != BATCH and point[name] != value]
    return changed[0] if len(changed) == 1 and changed[0] in FACTORS else None


def _sizes_run(point: Point, good: Sequence[Outcome]) -> set[int]:
    """The batches that ran with the same kernels."""
    return {int(o.point[BATCH]) for o in good if _same_kernels(o.point, point)}


def _surrounded(point: Point, good: Sequence[Outcome]) -> bool:
    """Whether smaller and larger batches than this ran with the same kernels."""
    ran = _sizes_run(point, good)
    return min(ran, default=0) < int(point[BATCH]) < max(ran, default=0)


def _first_of_policy(point: Point, baseline: Point) -> bool:
    """Whether this is where a policy is first tried: at the baseline, but for the policy.

    There memory is known to suffice, and a policy that is emulated a hundred times slower shows it
    on a small step.
    """
    return all(point[name] == value for name, value in baseline.items() if name != "policy")


def _most_promising(
    open_points: Sequence[Point], good: Sequence[Outcome], limits: Limits
) -> Next | Stop:
    model = _model(good)
    best = max(math.log(outcome.rate) for outcome in good)
    ranked = []
    for index, point in enumerate(open_points):
        prediction = model.predict(point)
        gain, cost = prediction.expected_gain(best), _cost(point, prediction, limits)
        if cost > limits.cheap_seconds and _leaps(point, open_points, good):
            continue
        likely = prediction.mean + limits.doubt * prediction.deviation > best + limits.gain
        if likely and gain > limits.gain_per_second * cost:
            ranked.append((gain / cost, -index, point, gain))
    if not ranked:
        return Stop(f"no untried point is likely to be more than {limits.gain:.0%} faster")
    _, _, point, gain = max(ranked, key=lambda item: item[:2])
    return Next(point, f"expected gain {math.expm1(gain):.1%}", _foreseen(model, point, best))


def _foreseen(model: ThroughputModel, point: Point, best: float) -> float:
    """The rate to expect at a point that may be chosen; 0 for one that lies too far behind."""
    mean = model.predict(point).mean
    return math.exp(mean) if mean > best - _CLIFF else 0.0


def _leaps(point: Point, open_points: Sequence[Point], good: Sequence[Outcome]) -> bool:
    """Whether a smaller batch is left out that is larger than all that ran with these kernels."""
    ran = _sizes_run(point, good)
    return any(
        max(ran, default=0) < int(other[BATCH]) < int(point[BATCH])
        for other in open_points
        if _same_arm(other, point)
    )


def _cost(point: Point, prediction: Prediction, limits: Limits) -> float:
    """Seconds the trial will take: its setup and its steps at the predicted throughput."""
    step = float(point[BATCH]) / math.exp(prediction.mean)
    return limits.setup_seconds + max(limits.timed_seconds, limits.steps * step)


def _model(good: Sequence[Outcome]) -> ThroughputModel:
    """The cost model of what ran; what is in doubt weighs little."""
    doubtful = suspects(good)
    return ThroughputModel(
        [replace(seen(o), deviation=_DOUBT) if o in doubtful else seen(o) for o in good]
    )


def _smallest(points: Sequence[Point]) -> Point:
    return min(points, key=lambda point: int(point[BATCH]))


def ruled_out(point: Point, history: Sequence[Outcome], limits: Limits) -> str:
    """Why `point` need not be measured: it cannot run or cannot fit. Empty: it may."""
    batch = int(point[BATCH])
    for outcome in history:
        at = int(outcome.point[BATCH])
        if outcome.status is Status.SHORT_DATA and batch >= at:
            return f"the data hold fewer than {at} samples a batch"
        if _fails(outcome) and _same_arm(point, outcome.point) and _beyond(point, outcome, history):
            return outcome.reason or str(outcome.status)
        if outcome.status in _GROWS_WORSE and batch >= at and _padded_more(point, outcome.point):
            return f"batch {at} ended with {outcome.status}"
    if limits.memory_bytes is None:
        return ""
    peaks = [
        MemorySeen(outcome.point, outcome.measurement.peak_memory_bytes)
        for outcome in history
        if outcome.measurement is not None and outcome.measurement.peak_memory_bytes > 0
    ]
    expected = predict_memory(point, peaks)
    if expected is not None and expected > limits.memory_bytes:
        return (
            f"would need about {expected / 2**30:.1f} GiB of the "
            f"{limits.memory_bytes / 2**30:.1f} GiB there are"
        )
    return ""


def _fails(outcome: Outcome) -> bool:
    return outcome.status in (Status.UNSUPPORTED, Status.CRASHED)


def _beyond(point: Point, failed: Outcome, history: Sequence[Outcome]) -> bool:
    """Whether a failure counts at `point`: everywhere, unless the same settings ran at some batch.

    Then it does at its own batch and at those that are further from where they ran.
    """
    at, batch = int(failed.point[BATCH]), int(point[BATCH])
    ran = [int(o.point[BATCH]) for o in history if o.rate > 0 and _same_arm(point, o.point)]
    return all(batch >= at if other < at else batch <= at for other in ran)


def _same_arm(left: Point, right: Point) -> bool:
    return all(right[name] == value for name, value in left.items() if name != BATCH)


def _padded_more(point: Point, other: Point) -> bool:
    """Whether two points differ at most in their batches and in that `point` is padded to more."""
    return all(
        value == other[name] or (name == ALIGNMENT and int(value) > int(other[name]))
        for name, value in point.items()
        if name != BATCH
    )


def _same_kernels(left: Point, right: Point) -> bool:
    """Whether two points compute with the same kernels: what further knobs hardly change."""
    return all(left[name] == right[name] for name in FACTORS if name in left)
