"""Tests single steps: the same weights, batch and random numbers give the same loss and gradient.

It is calibrated by a null: the same comparison between float32 and float32 with slightly noisy
weights, so that a task that is sensitive by nature is not blamed on the precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

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
    `FINER_FORMAT_LOSS_SHARE` of `tolerance.loss`. Where one of three or more checkpoints fails by
    no more than `TRANSIENT_FACTOR` times, the deviation is transient and left to the trajectories;
    except for the loss of the last one, after which nothing was observed. Whatever noise does, a
    gradient that is more than `tolerance.gradient` away at most checkpoints is wrong. What fails
    may still be `undecided`; see `Check`.
    """
    if not points:
        return Check(judged=False)
    finer = min(1.0, max(MIN_NOISE_SHARE, roundoff / NOISE_ROUNDOFF))
    scale = SMALLEST_LOSS_SHARE * abs(points[0].reference)
    null = finer * max((relative_deviation(p.loss, p.reference, scale) for p in noise), default=0.0)
    errors_of_noise = [(p.step, finer * (p.gradient_error or 0.0)) for p in noise]
    gradient_null = max((error for _, error in errors_of_noise), default=0.0)
    deviations = [relative_deviation(p.loss, p.reference, scale) for p in points]
    errors = [or_infinity(p.gradient_error) for p in points]
    gradient_limits = [_gradient_limit(p.step, errors_of_noise, tolerance) for p in points]
    numbers = Check(
        deviation=finite_or_none(max(deviations)),
        gradient_error=finite_or_none(max(errors)),
        noise=finite_or_none(null) if noise else None,
        gradient_noise=finite_or_none(gradient_null) if noise else None,
    )
    loss_limit = max(
        tolerance.loss * max(FINER_FORMAT_LOSS_SHARE, finer), tolerance.loss_null * null
    )
    failed: list[Check] = []
    transient = len(points) > 2
    wrong_gradient = len(points) > 2 and _lower_median(errors) > tolerance.gradient
    lost = wrong_gradient or any(
        e > limit for e, limit in zip(errors, gradient_limits, strict=True)
    )
    signed = [_signed_deviation(p, d) for p, d in zip(points, deviations, strict=True)]
    undecided = _why_undecided(signed, loss_limit, errors, lost)
    rows = zip(points, deviations, errors, gradient_limits, strict=True)
    for point, difference, error, gradient_limit in rows:
        both = ((difference, loss_limit, "loss"), (error, gradient_limit, "gradient"))
        beyond = [(away, limit, what) for away, limit, what in both if away > limit]
        if beyond:
            away, limit, what = beyond[0]
            last = point.step == points[-1].step
            transient &= not failed and all(a <= TRANSIENT_FACTOR * most for a, most, _ in beyond)
            transient &= not (last and what == "loss")
            problem = (
                f"at the same weights and batch of step {point.step} its {what} is "
                f"{percent(away)} away from float32's; {percent(limit)} is allowed"
            )
            of_loss = what == "loss"
            failed.append(replace(numbers, problem=problem, of_loss=of_loss, step=point.step))
    if failed and not transient:
        return replace(failed[0], undecided=undecided)
    if wrong_gradient:
        problem = (
            f"at most of {len(points)} checkpoints its gradient is "
            f"{percent(_lower_median(errors))} or more away from float32's; "
            f"{percent(tolerance.gradient)} is allowed"
        )
        return replace(numbers, problem=problem, step=points[0].step, undecided=undecided)
    far = UNTRAINED_NOISE_FACTOR * tolerance.loss < max(deviations) <= loss_limit
    return replace(numbers, undecided="noise_level") if far else numbers


def is_noise_sensitive(noise: Sequence[NoisyStep], tolerance: Tolerance) -> bool:
    """Return whether bfloat16-sized noise breaks float32 itself, so that it cannot be an excuse.

    Chaos and convergence leave the gradient well defined at the earlier checkpoints. Where noise
    moves it by more than is allowed at most of them, noise does what a broken precision does: for
    example with a weight that multiplies positions far beyond 256.
    """
    largest: dict[int, float] = {}
    for point in noise:
        largest[point.step] = max(largest.get(point.step, 0.0), point.gradient_error or 0.0)
    return _lower_median(list(largest.values())) > tolerance.gradient


def _signed_deviation(point: StepComparison, difference: float) -> float:
    """Return how far the loss is from float32's, negative where it is below."""
    return -difference if or_infinity(point.loss) < point.reference else difference


def _why_undecided(
    signed: Sequence[float], limit: float, errors: Sequence[float], lost: bool
) -> Undecided:
    """Say why what failed may be noise that training averages out; see `Check`.

    Rounding errors of both signs do no harm where the gradients are right.
    """
    away = max(abs(difference) for difference in signed)
    both = min(max(signed), -min(signed)) >= limit / 2
    if both and not lost and away <= BOTH_SIGNS_FACTOR * limit:
        return "both_signs"
    near = away <= TRANSIENT_FACTOR * limit and math.isfinite(max(errors))
    return "near_limit" if near else ""


def _lower_median(errors: Sequence[float]) -> float:
    """Return the lower median, which most errors reach; 0 of none."""
    return sorted(errors)[(len(errors) - 1) // 2] if errors else 0.0


def _gradient_limit(step: int, noise: Sequence[tuple[int, float]], tolerance: Tolerance) -> float:
    """Return how far the gradient of a step may deviate, relative to float32's.

    Noise elsewhere in the run never excuses a lost gradient: one that is all zero deviates by
    exactly 1. Noise at the step itself may, where hardly any gradient is left to compare with.
    """
    here = max((error for other, error in noise if other == step), default=0.0)
    lost = min(0.9, tolerance.gradient_null * max((error for _, error in noise), default=0.0))
    return max(tolerance.gradient, lost, tolerance.gradient_null * here)
