"""Tests single steps: the same weights, batch and random numbers give the same loss and gradient.

So do the outputs in evaluation, which reads what the loss of training does not: running statistics,
another branch, a decoder. All is calibrated by a null: the same comparison between float32 and
float32 with slightly noisy weights, so that a task that is sensitive by nature is not blamed on the
precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoprec.core.dtypes import DType
from autoprec.core.number_words import percent
from autoprec.core.numerics.tolerance import (
    SMALLEST_LOSS_SHARE,
    Check,
    Tolerance,
    Undecided,
    finite_or_none,
    or_infinity,
    relative_deviation,
    size_of,
)
from autoprec.core.numerics.traces import NoisyStep, StepComparison

MIN_NOISE_SHARE = 3 / 8
"""The least share of the noise that is allowed to a finer format: a discrete choice (a router's, an
argmax's) flips less often in it, but changes the loss as much when it does."""

FINER_FORMAT_LOSS_SHARE = 3 / 4
"""The share of `Tolerance.loss` that is allowed to a format finer than bfloat16."""

TRANSIENT_FACTOR = 2.0
"""A checkpoint may deviate this many times what is allowed and still be cleared by training."""

UNTRAINED_NOISE_FACTOR = 3.5
"""Deviations above this many times `Tolerance.loss` pass as noise only if training confirms it."""

BOTH_SIGNS_FACTOR = 10.0
"""Losses that deviate in both directions by more than this many times the limit fail outright."""

NOISE_ROUNDOFF = DType.BFLOAT16.limits.unit_roundoff
"""The unit roundoff of the format whose rounding the noise imitates."""

NOTHING_LEFT = 1.0
"""Outputs that are further from float32's than they vary over the batch hold nothing of them.
Nearer ones are left to the loss: in healthy trainings they may be nine tenths of that away."""


def check_single_steps(
    points: Sequence[StepComparison],
    noise: Sequence[NoisyStep],
    tolerance: Tolerance,
    roundoff: float = NOISE_ROUNDOFF,
) -> Check:
    """Check loss and gradient at the same weights, batch and random numbers.

    The loss may deviate by `tolerance.loss` or `tolerance.loss_null` times the null, the gradient
    by `tolerance.gradient` or by what noise allows, whichever is larger. The noise is bfloat16's; a
    format with a smaller `roundoff` is allowed less of it, but at least `MIN_NOISE_SHARE`, and
    `FINER_FORMAT_LOSS_SHARE` of `tolerance.loss`. If one of three or more checkpoints fails by
    no more than `TRANSIENT_FACTOR` times, the deviation is transient and left to the trajectories;
    except for the loss of the last one, after which nothing was observed. Whatever noise does, a
    gradient that is more than `tolerance.gradient` away at most checkpoints is wrong. What fails
    may still be `undecided`; see `Check`.
    """
    if not points:
        return Check(judged=False)
    finer = min(1.0, max(MIN_NOISE_SHARE, roundoff / NOISE_ROUNDOFF))
    scale = SMALLEST_LOSS_SHARE * size_of([point.reference for point in points])
    null = finer * max((relative_deviation(p.loss, p.reference, scale) for p in noise), default=0.0)
    errors_of_noise = [(p.step, finer * (p.gradient_error or 0.0)) for p in noise]
    gradient_null = max((error for _, error in errors_of_noise), default=0.0)
    least = tolerance.loss * max(FINER_FORMAT_LOSS_SHARE, finer)
    limit = max(least, tolerance.loss_null * null)
    rows = []
    for p in points:
        allowed = _gradient_limit(p.step, errors_of_noise, tolerance)
        away = relative_deviation(p.loss, p.reference, scale)
        rows.append(_Row(p, away, _gradient_away(p), limit, allowed))
    deviations, errors = [row.loss for row in rows], [row.gradient for row in rows]
    numbers = Check(
        deviation=finite_or_none(max(deviations)),
        gradient_error=finite_or_none(max(errors)),
        noise=finite_or_none(null) if noise else None,
        gradient_noise=finite_or_none(gradient_null) if noise else None,
    )
    median = _lower_median(errors)
    wrong_gradient = len(points) > 2 and median > tolerance.gradient
    lost = wrong_gradient or any(row.gradient > row.gradient_limit for row in rows)
    undecided = _why_undecided(rows, limit, lost)
    failed = [row for row in rows if row.problem]
    if failed and not _is_transient(failed, rows):
        of_loss = failed[0].loss > limit
        problem, step = failed[0].problem, failed[0].point.step
        return replace(numbers, problem=problem, of_loss=of_loss, step=step, undecided=undecided)
    if wrong_gradient:
        problem = (
            f"at most of {len(points)} checkpoints its gradient is {percent(median)} or more away "
            f"from float32's; {percent(tolerance.gradient)} is allowed"
        )
        return replace(numbers, problem=problem, step=points[0].step, undecided=undecided)
    far = UNTRAINED_NOISE_FACTOR * tolerance.loss < max(deviations) <= limit
    return replace(numbers, undecided="noise_level") if far else numbers


def check_other_batches(
    points: Sequence[StepComparison],
    others: Sequence[StepComparison],
    noise: Sequence[NoisyStep],
    tolerance: Tolerance,
    roundoff: float = NOISE_ROUNDOFF,
) -> Check:
    """Check single steps on batches of `others`' sizes, each by the limits of those of `points`.

    What is near a limit is left to training. A loss counts as at least a share of the first one.
    """
    for other in others:
        first = replace(points[0], loss=points[0].reference, gradient_error=0.0)
        own = [each for each in noise if each.batch == other.batch]
        found = check_single_steps((first, other), own, tolerance, roundoff)
        if not found.passed and not found.undecided:
            return replace(found, problem=f"on {other.batch}, {found.problem}")
    return Check(judged=bool(others))


@dataclass(frozen=True)
class _Row:
    """How far loss and gradient are from float32's at one checkpoint, and how far they may be."""

    point: StepComparison
    loss: float
    gradient: float
    loss_limit: float
    gradient_limit: float

    @property
    def problem(self) -> str:
        """Say what is too far away, the loss first; empty if nothing is."""
        what, away, limit = "loss", self.loss, self.loss_limit
        if away <= limit:
            what, away, limit = "gradient", self.gradient, self.gradient_limit
        if away <= limit:
            return ""
        return (
            f"at the same weights{'' if self.point.batch else ' and batch'} of step "
            f"{self.point.step} its {what} is "
            f"{percent(away)} away from float32's; {percent(limit)} is allowed"
        )

    @property
    def signed(self) -> float:
        """Return how far the loss is from float32's, negative if it is below."""
        return -self.loss if or_infinity(self.point.loss) < self.point.reference else self.loss


def _gradient_away(point: StepComparison) -> float:
    """Return how far the gradient is away; 0 where float32 has neither a loss nor a gradient."""
    if point.reference == 0.0 and point.gradient_error is None:
        return 0.0
    return or_infinity(point.gradient_error)


def _is_transient(failed: Sequence[_Row], rows: Sequence[_Row]) -> bool:
    """Return whether one checkpoint of several failed by so little that training may clear it."""
    only = failed[0]
    at_the_end = only is rows[-1] and only.loss > only.loss_limit
    return (
        len(rows) > 2
        and len(failed) == 1
        and not at_the_end
        and only.loss <= TRANSIENT_FACTOR * only.loss_limit
        and only.gradient <= TRANSIENT_FACTOR * only.gradient_limit
    )


def is_noise_sensitive(noise: Sequence[NoisyStep], tolerance: Tolerance) -> bool:
    """Return whether bfloat16-sized noise breaks float32 itself, so that it cannot be an excuse.

    Chaos and convergence leave the gradient well defined at the earlier checkpoints. If noise
    moves it by more than is allowed at most of them, noise does what a broken precision does: for
    example with a weight that multiplies positions far beyond 256.
    """
    largest: dict[int, float] = {}
    for point in noise:
        largest[point.step] = max(largest.get(point.step, 0.0), point.gradient_error or 0.0)
    return _lower_median(list(largest.values())) > tolerance.gradient


def _why_undecided(rows: Sequence[_Row], limit: float, lost: bool) -> Undecided:
    """Say why what failed may be noise that training averages out; see `Check`.

    Rounding errors of both signs do no harm if the gradients are right.
    """
    signed = [row.signed for row in rows]
    away = max(map(abs, signed))
    both = min(max(signed), -min(signed)) >= limit / 2
    if both and not lost and away <= BOTH_SIGNS_FACTOR * limit:
        return "both_signs"
    finite = all(math.isfinite(row.gradient) for row in rows)
    return "near_limit" if away <= TRANSIENT_FACTOR * limit and finite else ""


def _lower_median(errors: Sequence[float]) -> float:
    """Return the lower median, which most errors reach; 0 of none."""
    return sorted(errors)[(len(errors) - 1) // 2] if errors else 0.0


def _gradient_limit(step: int, noise: Sequence[tuple[int, float]], tolerance: Tolerance) -> float:
    """Return how far the gradient of a step may deviate, relative to float32's.

    Noise elsewhere in the run never excuses a lost gradient: one that is all zero deviates by
    exactly 1. Noise at the step itself may, if hardly any gradient is left to compare with.
    """
    here = max((error for other, error in noise if other == step), default=0.0)
    lost = min(0.9, tolerance.gradient_null * max((error for _, error in noise), default=0.0))
    return max(tolerance.gradient, lost, tolerance.gradient_null * here)


def check_evaluation(
    points: Sequence[StepComparison],
    noise: Sequence[NoisyStep],
    tolerance: Tolerance,
    roundoff: float = NOISE_ROUNDOFF,
) -> Check:
    """Check the outputs in evaluation, at the checkpoints that have any.

    They may be as far from float32's as `NOTHING_LEFT` says, or `tolerance.loss_null` times as far
    as noise moves them; a format with a smaller `roundoff` is allowed less of that.
    """
    evaluated = [point for point in points if point.evaluated]
    finer = min(1.0, max(MIN_NOISE_SHARE, roundoff / NOISE_ROUNDOFF))
    for point in evaluated:
        moved = [or_infinity(p.evaluation_error) for p in noise if p.step == point.step]
        limit = max(NOTHING_LEFT, tolerance.loss_null * finer * max(moved, default=0.0))
        error = or_infinity(point.evaluation_error)
        if error > limit:
            problem = (
                f"in evaluation, at the weights of step {point.step}, its outputs are "
                f"{percent(error)} away from float32's; {percent(limit)} is allowed"
            )
            return Check(problem=problem, step=point.step)
    return Check(judged=bool(evaluated))
