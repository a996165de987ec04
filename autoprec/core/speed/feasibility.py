"""Rules out points that cannot run, or cannot fit, given what was measured before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from autoprec.core.recipe import KEEP_MEMORY
from autoprec.core.speed.assumptions import SPEED
from autoprec.core.speed.cost_model import MeasuredMemory, predict_memory
from autoprec.core.speed.knobs import SHORT_STEP_SECONDS, STEPS_PER_EXECUTION
from autoprec.core.speed.space import ALIGNMENT, BATCH, Point, Space, point_key
from autoprec.core.speed.stopping import Limits
from autoprec.core.speed.trial_results import Outcome, Status, compile_seconds, fit_model

#: Trials that end so do so at every larger batch of the same arm, too, however it is padded.
_FAILS_AT_LARGER_BATCHES = (
    Status.OUT_OF_MEMORY,
    Status.WOULD_NOT_FIT,
    Status.TIMEOUT,
    Status.KILLED,
)

BATCH_TOO_LARGE = (Status.OUT_OF_MEMORY, Status.WOULD_NOT_FIT, Status.KILLED)
"""Trials that end so mean that the batch is too large for this machine."""

#: How many times larger a batch may be than the largest that ran.
_MAX_BATCH_GROWTH = 8

#: How many times smaller a batch may be than the smallest that ran.
_MAX_BATCH_SHRINKAGE = 4

#: Share of the memory that a recipe may take in a trial where freed memory is kept. What lies
#: between blocks in use can serve smaller ones only, and how much that is differs from process to
#: process: a GPT at batch 64 took 2.5 to 4.3 GiB of a Zen 5's memory. With texts of any length it
#: took 1.5 to 1.7 times as much after 200 steps as after ten, and 2.2 times as much once it had
#: been evaluated (`python -m benchmarks.ablations.memory_growth`), which no trial does.
KEPT_MEMORY_SHARE = 0.5


def fitting_baseline(space: Space, baseline: Point, history: Sequence[Outcome]) -> Point | None:
    """Return the baseline, or the largest smaller batch that fits where it does not.

    None where plain float32 fails in another way, or at every batch. A point that was not tried yet
    is assumed to run.
    """
    ended = {point_key(outcome.point): outcome for outcome in history}
    sizes = sorted((s for s in space.batch_sizes if s <= int(baseline[BATCH])), reverse=True)
    for size in sizes:
        point = {**baseline, BATCH: size}
        outcome = ended.get(point_key(point))
        if outcome is None or outcome.rate > 0:
            return point
        if outcome.status not in BATCH_TOO_LARGE:
            return None
    return None


def why_ruled_out(point: Point, history: Sequence[Outcome], memory_bytes: float | None) -> str:
    """Say why `point` need not be measured: it cannot run or cannot fit; empty where it may."""
    batch = int(point[BATCH])
    for outcome in history:
        at = int(outcome.point[BATCH])
        if outcome.status is Status.SHORT_DATA and batch >= at:
            return f"the data hold fewer than {at} samples a batch"
        if (
            _failed(outcome)
            and same_arm(point, outcome.point)
            and _failure_applies(point, outcome, history)
        ):
            return outcome.reason or str(outcome.status)
        if (
            outcome.status in _FAILS_AT_LARGER_BATCHES
            and batch >= at
            and _is_padded_more(point, outcome.point)
        ):
            return f"batch {at} ended with {outcome.status}"
    if memory_bytes is None:
        return ""
    peaks = [
        MeasuredMemory(outcome.point, outcome.measurement.peak_memory_bytes)
        for outcome in history
        if outcome.measurement is not None and outcome.measurement.peak_memory_bytes > 0
    ]
    expected = predict_memory(point, peaks)
    if expected is not None and expected > _usable_bytes(point, memory_bytes):
        return f"would need about {_needed_text(expected, point, memory_bytes)}"
    return ""


def with_room_to_grow(outcome: Outcome, memory_bytes: float | None) -> Outcome:
    """Return what a trial that ran is worth: nothing where a training may outgrow the memory.

    So it is where freed memory is kept and the trial took more than `KEPT_MEMORY_SHARE` of it. Its
    peak is dropped, for peaks that were measured are taken for ones that fit.
    """
    if outcome.measurement is None or not outcome.point.get(KEEP_MEMORY):
        return outcome
    peak = outcome.measurement.peak_memory_bytes
    if memory_bytes is None or peak <= _usable_bytes(outcome.point, memory_bytes):
        return outcome
    why = f"took {_needed_text(peak, outcome.point, memory_bytes)}"
    return replace(outcome, status=Status.WOULD_NOT_FIT, measurement=None, reason=why)


def _usable_bytes(point: Point, memory_bytes: float) -> float:
    return memory_bytes * (KEPT_MEMORY_SHARE if point.get(KEEP_MEMORY) else 1.0)


def _needed_text(needed_bytes: float, point: Point, memory_bytes: float) -> str:
    usable, available = _usable_bytes(point, memory_bytes) / 2**30, memory_bytes / 2**30
    needed = f"{needed_bytes / 2**30:.1f} GiB"
    if not point.get(KEEP_MEMORY):
        return f"{needed} of the {available:.1f} GiB available"
    return (
        f"{needed}, more than {usable:.1f} of the {available:.1f} GiB available: if freed "
        "memory is kept, it may grow in a long training"
    )


def outpaces_loader(point: Point, history: Sequence[Outcome]) -> bool:
    """Return whether the loader is the limit at a smaller batch already, of the same policy.

    And whether it feeds no more samples a second at larger ones: the most, within the error of its
    timing, at another than the largest that ran.
    """
    ran = [outcome for outcome in history if outcome.rate > 0]
    largest = max((int(outcome.point[BATCH]) for outcome in ran), default=0)
    most = (1 - SPEED.loader_share) * max((o.loader_feeds for o in ran), default=0.0)
    if not any(o.loader_feeds >= most for o in ran if int(o.point[BATCH]) < largest):
        return False
    return any(
        outcome.loader_feeds < outcome.rate
        and outcome.loader_feeds >= most
        and outcome.point["policy"] == point["policy"]
        and int(outcome.point[BATCH]) < int(point[BATCH])
        for outcome in ran
    )


def saves_no_calls(point: Point, baseline: Point, history: Sequence[Outcome]) -> bool:
    """Return whether a batch's steps are too long for several of them in a call to save anything.

    Such a trial takes several times as long, too. Where a number of steps is given, none is saved.
    """
    if point.get(STEPS_PER_EXECUTION) == baseline.get(STEPS_PER_EXECUTION):
        return False
    fastest = max((outcome.rate for outcome in history), default=0.0)
    return int(point[BATCH]) >= SHORT_STEP_SECONDS * fastest > 0


def is_within_reach(point: Point, history: Sequence[Outcome]) -> bool:
    """Return whether a batch is at most eight times one that ran, and at least half of one.

    If possible, of its own policy.
    """
    good = [outcome.point for outcome in history if outcome.rate > 0]
    own = [other for other in good if other["policy"] == point["policy"]]
    size = int(point[BATCH])
    ran = [int(other[BATCH]) for other in own or good] or [size]
    return min(ran) / _MAX_BATCH_SHRINKAGE <= size <= _MAX_BATCH_GROWTH * max(ran)


def _failed(outcome: Outcome) -> bool:
    return outcome.status in (Status.UNSUPPORTED, Status.CRASHED)


def _failure_applies(point: Point, failed: Outcome, history: Sequence[Outcome]) -> bool:
    """Return whether a failure counts at `point`: everywhere, unless the arm ran at some batch.

    Then it counts at its own batch and at those further from where the arm ran.
    """
    at, batch = int(failed.point[BATCH]), int(point[BATCH])
    ran = [int(o.point[BATCH]) for o in history if o.rate > 0 and same_arm(point, o.point)]
    return all(batch >= at if other < at else batch <= at for other in ran)


def same_arm(left: Point, right: Point) -> bool:
    """Return whether two points differ at most in their batches."""
    return all(right[name] == value for name, value in left.items() if name != BATCH)


def _is_padded_more(point: Point, other: Point) -> bool:
    """Return whether `point` differs from `other` at most in its batch and a larger padding."""
    return all(
        value == other[name] or (name == ALIGNMENT and int(value) > int(other[name]))
        for name, value in point.items()
        if name != BATCH
    )


def in_time(points: Sequence[Point], history: Sequence[Outcome], limits: Limits) -> list[Point]:
    """Return the points whose trials end in the time that is left, by the steps seen so far."""
    good = [outcome for outcome in history if outcome.rate > 0]
    if math.isinf(limits.seconds_left) or not good:
        return list(points)
    model, compiling = fit_model(good), compile_seconds(history)
    return [
        point
        for point in points
        if limits.ends_in_time(
            float(point[BATCH]) / math.exp(model.predict(point).mean),
            compiling if point["compile"] else 0.0,
        )
    ]
