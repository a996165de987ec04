"""Finds failures that show late: long runs that diverge, error floors, and growing gradients.

A long run is judged by where it ends, over the seeds, against what noise in the initial weights
does to float32 by then. A rounding error that stays constant while the loss falls is extrapolated
along the loss curve. Nothing here trains.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoprec.core.dtypes import DType
from autoprec.core.number_words import percent
from autoprec.core.numerics.loss_curves import SeedRun, seed_spread
from autoprec.core.numerics.proof_steps import FALLING_LOSS_SHARE, loss_fall
from autoprec.core.numerics.tolerance import (
    CERTAIN_DEVIATION,
    SMALLEST_LOSS_SHARE,
    Check,
    Tolerance,
    chance,
    finite_or_none,
    mean,
    or_infinity,
    relative_deviation,
    root_mean_square,
    size_of,
)
from autoprec.core.numerics.traces import NoisyStep, StepComparison, Trajectory

SMALLEST_LATE_LOSS_SHARE = 1e-4
"""Losses below this share of the first one count as this much when a long run is judged."""

LONG_RUN_FACTOR = 2.0
"""How many times `Tolerance.trajectory` a long run may deviate at its end: it varies more."""

SECOND_SEED_SHARE = 0.5
"""The share of that from which a second seed and noisy runs are needed."""

FOLLOW_UP_SHARE = 0.5
"""The share of `Tolerance.loss` from which a growing deviation at the same weights is followed
further. One in ten of the zoo's healthy pairs exceeds it, four in five of the broken ones do."""

FOLLOW_UP_GROWTH = 1.5
"""Growth of float16 magnitudes between the last two checkpoints from which a run is extended."""

NOISE_FACTOR = 3.0
"""How many times as far as noise drives float32 a run may deviate."""

MIN_CHECKPOINTS, ERROR_FLOOR_GROWTH, ERROR_FLOOR_SHARE = 3, 1.5, 0.25
"""An error floor shows at this many checkpoints in a row, its share of the loss growing by this
factor each time, and is finally no less than `ERROR_FLOOR_SHARE` times `Tolerance.loss`."""

STANDARD_ERRORS = 2.0
"""How many standard errors of a mean over further batches, or over samples, are attributed to
chance."""

EXTRAPOLATION_FACTOR = 4
"""A loss that still falls is extrapolated to this many times the steps that were observed."""

SKIPPED_STEPS_SHARE = 0.02
"""The share of a long run's steps that the loss scaler may skip."""


def check_long_runs(runs: Sequence[SeedRun], tolerance: Tolerance) -> Check:
    """Check where long runs end: the mean loss of their last fifth against float32's.

    It fails if the seeds agree that it is further away than `LONG_RUN_FACTOR` times
    `tolerance.trajectory`, and than `NOISE_FACTOR` times what noise does. If a loss has not yet
    become small, neither seeds that differ nor noise excuse one above `CERTAIN_DEVIATION`.
    """
    if not runs or not all(run.reference.finite for run in runs):
        return Check(judged=False)
    for run in runs:
        broken = check_long_run_stability(run.candidate, tolerance)
        if not broken.passed:
            return broken
    away = [_end_deviation(run.candidate, run.reference) for run in runs]
    nulls = [_end_deviation(run.noisy, run.reference) for run in runs if run.noisy]
    null = root_mean_square(nulls)
    numbers = Check(deviation=finite_or_none(abs(mean(away))), noise=finite_or_none(null))
    references = [[or_infinity(loss) for loss in run.reference.losses] for run in runs]
    small = _all_end_below(runs, SMALLEST_LOSS_SHARE)
    noise = NOISE_FACTOR * null if small else chance(null, NOISE_FACTOR)
    always, spread = LONG_RUN_FACTOR * tolerance.trajectory, seed_spread(references)
    agree = all(each > 0 for each in away) or all(each < 0 for each in away)
    certain = not small and mean(away) > max(CERTAIN_DEVIATION, null)
    if abs(mean(away)) <= always:
        return replace(numbers, below=_all_end_below(runs, SMALLEST_LATE_LOSS_SHARE))
    if abs(mean(away)) <= max(noise, spread) or not (agree or certain):
        return replace(numbers, below=small, excused=_excuse(abs(mean(away)), noise, agree))
    steps = len(runs[0].reference.losses)
    problem = (
        f"after {steps} steps its loss is {percent(abs(mean(away)))} away from float32's over "
        f"{len(runs)} seeds; noise in the weights moves it by {percent(null)}"
    )
    return replace(numbers, problem=problem, of_loss=True, step=steps)


def _excuse(away: float, noise: float, agree: bool) -> str:
    """Say why a long run that ends so far away passes."""
    if not agree:
        return "seeds differ in both directions"
    by_noise = "noise in the weights moves float32 as much"
    return by_noise if away <= noise else "float32's own seeds end as far from each other"


def _all_end_below(runs: Sequence[SeedRun], share: float) -> float | None:
    """Return the share if all runs end below that share of the first loss, else None."""
    below = all(
        max(_end_losses(run.candidate, run.reference)) < share * size_of(run.reference.losses)
        for run in runs
    )
    return share if below else None


def needs_second_seed(run: SeedRun, tolerance: Tolerance) -> bool:
    """Return whether one seed's long run ends so far away that a second seed is needed."""
    if not check_long_run_stability(run.candidate, tolerance).passed:
        return False
    away = abs(_end_deviation(run.candidate, run.reference))
    return away > SECOND_SEED_SHARE * LONG_RUN_FACTOR * tolerance.trajectory


def needs_more_steps(runs: Sequence[SeedRun], tolerance: Tolerance) -> bool:
    """Return whether the seeds deviate in the same direction, but by too little to reject."""
    stricter = replace(tolerance, trajectory=SECOND_SEED_SHARE * tolerance.trajectory)
    return check_long_runs(runs, tolerance).passed and not check_long_runs(runs, stricter).passed


def deviation_grows(points: Sequence[StepComparison], tolerance: Tolerance) -> bool:
    """Return whether the loss at the same weights moves away from float32's between checkpoints.

    It does if the last deviation is larger than the one before and at least `FOLLOW_UP_SHARE` of
    what is allowed. Then further steps are worth running even if float32's loss has stopped
    falling.
    """
    if len(points) < 2:
        return False
    least = SMALLEST_LOSS_SHARE * size_of([point.reference for point in points])
    before, last = (relative_deviation(p.loss, p.reference, least) for p in points[-2:])
    return last > before and last >= FOLLOW_UP_SHARE * tolerance.loss


def magnitudes_grow(points: Sequence[StepComparison]) -> bool:
    """Return whether forward or backward float16 magnitudes grew by half between checkpoints.

    Then the float16 run alone is extended: an overflow needs no float32 run to compare with.
    """
    if len(points) < 2:
        return False
    before, last = points[-2:]
    pairs = ((before.largest, last.largest), (before.backward, last.backward))
    return any(b and a and a >= FOLLOW_UP_GROWTH * b for b, a in pairs)


def check_long_run_stability(run: Trajectory | None, tolerance: Tolerance) -> Check:
    """Check that a long run stays finite and skips few steps."""
    if run is None:
        return Check(judged=False)
    for step, loss in enumerate(run.losses):
        if loss is None or not math.isfinite(loss):
            return Check(problem=f"the loss is not finite at step {step}", step=step)
    allowed = max(tolerance.skipped, SKIPPED_STEPS_SHARE * len(run.losses))
    if len(run.skipped) <= allowed:
        return Check()
    problem = (
        f"{len(run.skipped)} of {len(run.losses)} steps were skipped because gradients overflowed, "
        f"the first of them step {run.skipped[0]}"
    )
    return Check(problem=problem, step=run.skipped[0], skipped=len(run.skipped))


def _end_deviation(run: Trajectory, reference: Trajectory) -> float:
    """Return the signed deviation of the mean loss of a run's last fifth from float32's."""
    ours, theirs = _end_losses(run, reference)
    away = relative_deviation(ours, theirs, SMALLEST_LATE_LOSS_SHARE * size_of(reference.losses))
    return -away if ours < theirs else away


def _end_losses(run: Trajectory, reference: Trajectory) -> tuple[float, float]:
    """Return the mean loss of the last fifth of a run, cut to float32's length, and float32's."""
    steps = len(reference.losses)
    tail = max(1, steps // 5)
    ours, theirs = run.losses[:steps][-tail:], reference.losses[-tail:]
    return mean(map(or_infinity, ours)), mean(map(or_infinity, theirs))


# Extrapolation from the checkpoints of a run -----------------------------------------------------


@dataclass(frozen=True)
class _Excess:
    """By how much a loss is above float32's at one checkpoint, and what chance may add to that.

    Shares are of `level`: float32's loss, or the smallest loss that an excess is divided by.
    """

    step: int
    amount: float
    error: float
    level: float

    @property
    def least(self) -> float:
        return self.amount - self.error

    @property
    def most(self) -> float:
        return self.amount + self.error

    @property
    def share(self) -> float:
        return self.amount / self.level

    @property
    def largest_share(self) -> float:
        return self.most / self.level


def _excess(point: StepComparison, floor: float) -> _Excess:
    loss, reference = point.losses
    error = STANDARD_ERRORS * point.mean_error
    return _Excess(point.step, loss - reference, error, max(abs(reference), floor))


def check_error_floor(
    points: Sequence[StepComparison], noise: Sequence[NoisyStep], run: SeedRun, tolerance: Tolerance
) -> Check:
    """Check that the rounding error shrinks with the loss.

    At the same weights, an excess over float32's loss that is no smaller at the last checkpoints
    than before is an error floor: its share grows as the loss falls. If it is a mean over
    batches, up to `STANDARD_ERRORS` standard errors are attributed to chance. If the float32
    loss was still falling when the proof's steps ended, it is extrapolated to
    `EXTRAPOLATION_FACTOR` times the steps; by then the floor must not exceed what a long run may
    deviate. Training must confirm it: an error made anew in every step also shows in the loss of
    the trained candidate.
    """
    reference = run.reference
    falling = loss_fall(reference.losses)
    if falling < FALLING_LOSS_SHARE or len(points) < MIN_CHECKPOINTS:
        return Check(judged=False)
    floor = SMALLEST_LATE_LOSS_SHARE * size_of(reference.losses)
    excesses = [_excess(point, floor) for point in points[-MIN_CHECKPOINTS:]]
    last = excesses[-1]
    allowed = max(ERROR_FLOOR_SHARE * tolerance.loss, NOISE_FACTOR * _noise_at(last.step, noise))
    above = all(each.most > 0 for each in excesses)
    stays = all(
        2 * later.amount >= earlier.least for earlier, later in itertools.pairwise(excesses)
    )
    grows = all(
        last.share > ERROR_FLOOR_GROWTH ** (MIN_CHECKPOINTS - 1 - at) * each.largest_share
        for at, each in enumerate(excesses[:-1])
    )
    trained, plain = _end_losses(run.candidate, reference)
    confirmed = 2 * (trained - plain) >= last.least
    if not (above and stays and grows and confirmed and last.least / last.level > allowed):
        return Check()
    level = max(last.level * (1 - falling) ** math.log2(EXTRAPOLATION_FACTOR), floor)
    expected = last.least / level
    if expected <= LONG_RUN_FACTOR * tolerance.trajectory:
        return Check(deviation=finite_or_none(expected))
    steps = ", ".join(str(each.step) for each in excesses)
    problem = (
        f"at the same weights of steps {steps} its loss is "
        f"{', '.join(percent(each.share) for each in excesses)} "
        f"above float32's: an error that stays constant while the loss falls; it will be "
        f"{percent(expected)} of the loss by step {EXTRAPOLATION_FACTOR * len(reference.losses)}, "
        "if that keeps falling"
    )
    return Check(problem=problem, of_loss=True, step=last.step, deviation=finite_or_none(expected))


def _noise_at(step: int, noise: Sequence[NoisyStep]) -> float:
    """Return how far noise in the weights moves float32's loss at a step, as a share of it."""
    moved = [
        abs(or_infinity(point.loss) - point.reference) / (abs(point.reference) or 1.0)
        for point in noise
        if point.step == step
    ]
    return max(moved, default=0.0)


def check_gradient_growth(points: Sequence[StepComparison]) -> Check:
    """Check that the backward pass's float16 magnitudes will not overflow at loss scale 1.

    Magnitudes, as at that scale, that doubled between checkpoints are extrapolated by as many
    octaves for each doubling of the steps; a lower scale only puts off when they pass the format's
    largest number. They must not do so within `EXTRAPOLATION_FACTOR` times the steps observed.
    """
    magnitudes = [(p.step + 1, math.log2(p.backward)) for p in points if p.backward]
    if len(magnitudes) < MIN_CHECKPOINTS:
        return Check(judged=False)
    last = magnitudes[-MIN_CHECKPOINTS:]
    grew = [after - before for (_, before), (_, after) in itertools.pairwise(last)]
    if min(grew) < 1.0:
        return Check()
    (before, _), (step, octaves) = last[-2:]
    octaves_per_doubling = grew[-1] / math.log2(step / before)
    left = DType.FLOAT16.limits.max_exponent + 1 - octaves
    overflow_step = (
        step * 2 ** max(0.0, left / octaves_per_doubling)
        if left / octaves_per_doubling < 64
        else math.inf
    )
    if overflow_step > EXTRAPOLATION_FACTOR * step:
        return Check()
    largest = " to ".join(f"{2**each:.3g} at step {made - 1}" for made, each in last)
    problem = (
        f"the largest float16 number of its backward pass grows from {largest}; so at a loss "
        f"scale of 1 it will overflow at about step {overflow_step:.0f}, and a lower one only puts "
        "that off"
    )
    return Check(problem=problem, step=step - 1)
