"""What shows late: breaks that need a small loss, error floors, and gradients that will overflow.

A long run is judged by where it ends, over the seeds, against what noise in the initial weights
does to float32 by then. Rounding whose size stays while the loss falls is continued along the loss
curve. Nothing here trains.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from autoprec.core.dtypes import DType
from autoprec.core.numerics.loss_curves import SeedRun, spread
from autoprec.core.numerics.proof_steps import STILL_FALLS, fall
from autoprec.core.numerics.records import NoisePoint, ShadowPoint, Trajectory
from autoprec.core.numerics.tolerance import (
    LOSS_FLOOR,
    Check,
    Tolerance,
    deviation,
    finite,
    mean,
    number,
    percent,
    root_mean_square,
)

FLOOR = 1e-4
"""Losses below this share of the first one count as this much: what a long run is asked for."""

WIDER = 2.0
"""How many times `Tolerance.trajectory` a long run may end away: it varies more."""

SUSPECT = 0.5
"""The share of that from which a second seed and noise are asked."""

LEANING = 0.5
"""The share of `Tolerance.loss` from which a loss at the same weights that leaves float32's is
followed further. Of the zoo's healthy pairs one in ten does so, of the broken ones four in five."""

GREW = 1.5
"""By how much float16 numbers grow between the last marks of a run that are followed further."""

NULL = 3.0
"""How many times as far as noise drives float32."""

MARKS, GROWS, SEEN = 3, 1.5, 0.25
"""An error floor shows at so many marks in a row, its share of the loss growing by this each time,
and is at last no less than `SEEN` times `Tolerance.loss`."""

SURELY = 2.0
"""How many standard errors of a mean over further batches are granted."""

HORIZON = 4
"""A loss that still falls is continued for so many times the steps that were seen."""

SKIPPED = 0.02
"""The share of a long run's steps that the loss scaler may throw away."""


def long_run(runs: Sequence[SeedRun], tolerance: Tolerance) -> Check:
    """Check where long runs end: the mean loss of their last fifth against float32's.

    It fails where the seeds agree that it is further away than `WIDER` times
    `tolerance.trajectory`, and than `NULL` times what noise does.
    """
    if not runs or not all(run.reference.finite for run in runs):
        return Check(judged=False)
    for run in runs:
        broken = late_gate(run.candidate, tolerance)
        if not broken.passed:
            return broken
    away = [_ending(run.candidate, run.reference) for run in runs]
    nulls = [_ending(run.noisy, run.reference) for run in runs if run.noisy]
    null = root_mean_square(nulls)
    numbers = Check(deviation=finite(abs(mean(away))), noise=finite(null))
    references = [[number(loss) for loss in run.reference.losses] for run in runs]
    limit = max(WIDER * tolerance.trajectory, NULL * null, spread(references))
    agree = all(each > 0 for each in away) or all(each < 0 for each in away)
    if not agree or abs(mean(away)) <= limit:
        return numbers
    steps = len(runs[0].reference.losses)
    problem = (
        f"after {steps} steps its loss is {percent(abs(mean(away)))} away from float32's over "
        f"{len(runs)} seeds; noise in the weights moves it by {percent(null)}"
    )
    return replace(numbers, problem=problem, step=steps)


def wants_another_run(run: SeedRun, tolerance: Tolerance) -> bool:
    """Whether one seed's long run ends so far away that another one, and noise, must be asked."""
    if not late_gate(run.candidate, tolerance).passed:
        return False
    away = abs(_ending(run.candidate, run.reference))
    return away > SUSPECT * WIDER * tolerance.trajectory


def wants_more_steps(runs: Sequence[SeedRun], tolerance: Tolerance) -> bool:
    """Whether the seeds agree that a long run leans away, but by too little to reject it."""
    leaning = replace(tolerance, trajectory=SUSPECT * tolerance.trajectory)
    return long_run(runs, tolerance).passed and not long_run(runs, leaning).passed


def leans(points: Sequence[ShadowPoint], tolerance: Tolerance) -> bool:
    """Whether the loss at the same weights leaves float32's from one mark to the next.

    By less than is allowed, but by `LEANING` of it, and more at the last mark than before: what the
    next steps show is worth knowing, although float32's loss may have ceased to fall.
    """
    if len(points) < 2:
        return False
    least = LOSS_FLOOR * abs(points[0].reference)
    before, last = (deviation(p.loss, p.reference, least) for p in points[-2:])
    return last > before and last >= LEANING * tolerance.loss


def grows(points: Sequence[ShadowPoint]) -> bool:
    """Whether float16 numbers of the forward or backward pass grew by half from mark to mark.

    Then float16 is followed further, alone: where it overflows needs nothing to compare with.
    """
    if len(points) < 2:
        return False
    before, last = points[-2:]
    pairs = ((before.largest, last.largest), (before.backward, last.backward))
    return any(b and a and a >= GREW * b for b, a in pairs)


def late_gate(run: Trajectory | None, tolerance: Tolerance) -> Check:
    """Check that a long run stays finite and keeps its steps."""
    if run is None:
        return Check(judged=False)
    for step, loss in enumerate(run.losses):
        if loss is None or not math.isfinite(loss):
            return Check(problem=f"the loss is not finite at step {step}", step=step)
    allowed = max(tolerance.skipped, SKIPPED * len(run.losses))
    if len(run.skipped) <= allowed:
        return Check()
    problem = (
        f"{len(run.skipped)} of {len(run.losses)} steps were skipped because gradients overflowed, "
        f"the first of them step {run.skipped[0]}"
    )
    return Check(problem=problem, step=run.skipped[0], skipped=len(run.skipped))


def _ending(run: Trajectory, reference: Trajectory) -> float:
    """How far the mean loss of a run's last fifth is from float32's; above it as a positive one."""
    ours, theirs = _ends(run, reference)
    away = deviation(ours, theirs, FLOOR * abs(number(reference.losses[0])))
    return -away if ours < theirs else away


def _ends(run: Trajectory, reference: Trajectory) -> tuple[float, float]:
    """The mean losses of the last fifth of a run, as long as float32's, and of float32's."""
    steps = len(reference.losses)
    tail = max(1, steps // 5)
    ours, theirs = run.losses[:steps][-tail:], reference.losses[-tail:]
    return mean(map(number, ours)), mean(map(number, theirs))


# What the marks of a run foretell -----------------------------------------------------------------


def error_floor(
    points: Sequence[ShadowPoint],
    noise: Sequence[NoisePoint],
    run: SeedRun,
    tolerance: Tolerance,
) -> Check:
    """Check that rounding does not stay while the loss falls.

    At the same weights, an excess over float32's loss that is no smaller at the last marks than
    before is a floor: its share grows as the loss falls. Where it is a mean over batches, what
    `SURELY` standard errors could explain is granted. Where the float32 loss was still falling
    when the proof's steps ended, it is continued for `HORIZON` times the steps; by then the floor
    must be no more than a long run may be away. Training must bear it out: what is rounded anew in
    every step is in the loss of a trained candidate, too.
    """
    reference = run.reference
    still = fall(reference.losses)
    if still < STILL_FALLS or len(points) < MARKS:
        return Check(judged=False)
    last = points[-MARKS:]
    pairs = [point.losses for point in last]
    excesses = [ours - theirs for ours, theirs in pairs]
    errors = [SURELY * point.mean_error for point in last]
    least = FLOOR * abs(number(reference.losses[0])) or 1.0
    levels = [max(abs(theirs), least) for _, theirs in pairs]
    shares = [excess / level for excess, level in zip(excesses, levels, strict=True)]
    most = [(e + error) / level for e, error, level in zip(excesses, errors, levels, strict=True)]
    sure = (excesses[-1] - errors[-1]) / levels[-1]
    allowed = max(SEEN * tolerance.loss, NULL * _noise_at(last[-1].step, noise))
    above = all(e + error > 0 for e, error in zip(excesses, errors, strict=True))
    stays = all(
        2 * later >= earlier - error
        for (earlier, later), error in zip(itertools.pairwise(excesses), errors, strict=False)
    )
    grows = all(shares[-1] > GROWS ** (MARKS - 1 - at) * most[at] for at in range(MARKS - 1))
    trained, plain = _ends(run.candidate, reference)
    borne_out = 2 * (trained - plain) >= excesses[-1] - errors[-1]
    if not (above and stays and grows and borne_out and sure > allowed):
        return Check()
    ahead = sure / (1 - still) ** math.log2(HORIZON)
    if ahead <= WIDER * tolerance.trajectory:
        return Check(deviation=finite(ahead))
    seen = ", ".join(percent(share) for share in shares)
    problem = (
        f"at the same weights of steps {', '.join(str(p.step) for p in last)} its loss is {seen} "
        f"above float32's: an error that stays while the loss falls; it is {percent(ahead)} of the "
        f"loss by step {HORIZON * len(reference.losses)}, if that falls on"
    )
    return Check(problem=problem, step=last[-1].step, deviation=finite(ahead))


def _noise_at(step: int, noise: Sequence[NoisePoint]) -> float:
    """How far noise in the weights moves float32's loss at a step, as a share of it."""
    moved = [abs(number(p.loss) - p.reference) / (abs(p.reference) or 1.0) for p in noise]
    return max((m for m, p in zip(moved, noise, strict=True) if p.step == step), default=0.0)


def gradient_overflow(points: Sequence[ShadowPoint]) -> Check:
    """Check that the backward pass's float16 numbers do not grow beyond the format at any scale.

    Magnitudes as at loss scale 1 that doubled from mark to mark are continued by as many octaves
    for each doubling of the steps; a scale can do nothing about those that pass the format's
    largest number. They must not within `HORIZON` times the steps seen.
    """
    seen = [(p.step + 1, math.log2(p.backward)) for p in points if p.backward]
    if len(seen) < MARKS:
        return Check(judged=False)
    last = seen[-MARKS:]
    grew = [after - before for (_, before), (_, after) in itertools.pairwise(last)]
    if min(grew) < 1.0:
        return Check()
    (before, _), (step, octaves) = last[-2:]
    pace = grew[-1] / math.log2(step / before)
    left = DType.FLOAT16.limits.max_exponent + 1 - octaves
    when = step * 2 ** max(0.0, left / pace) if left / pace < 64 else math.inf
    if when > HORIZON * step:
        return Check()
    largest = " to ".join(f"{2**each:.3g} at step {made - 1}" for made, each in last)
    problem = (
        f"the largest float16 number of its backward pass grows from {largest}; so it will "
        f"overflow at about step {when:.0f}, whatever the loss scale"
    )
    return Check(problem=problem, step=step - 1)
