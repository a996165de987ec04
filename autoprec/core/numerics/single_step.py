"""The shadow test: the same weights, batch and random numbers must give the same loss and gradient.

It is calibrated by a null: the same comparison between float32 and float32 with slightly noisy
weights, so that a task that is sensitive by nature is not blamed on the precision.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from autoprec.core.dtypes import DType
from autoprec.core.numerics.records import NoisePoint, ShadowPoint
from autoprec.core.numerics.tolerance import (
    LOSS_FLOOR,
    Check,
    Doubt,
    Tolerance,
    deviation,
    finite,
    mean,
    number,
    percent,
    root_mean_square,
)

FLIPS = 3 / 8
"""The share of the noise that the finest format is excused: a choice that flips (a router's, an
argmax's) flips more seldom in it, but changes no less when it does."""

FINER_LOSS = 3 / 4
"""The share of `Tolerance.loss` that a format finer than bfloat16 has."""

PASSED_THROUGH = 2.0
"""How many times what is allowed a checkpoint may deviate that training can speak for."""

EXCUSED = 3.5
"""How many times `Tolerance.loss` noise excuses before training must show that it is noise."""

OUTRIGHT = 10.0
"""The same for losses that are off in both directions."""

NOISE_ROUNDOFF = DType.BFLOAT16.limits.unit_roundoff
"""The format whose rounding the null's noise stands for."""

HORIZON = 10
"""Numbers that grow are looked ahead for this many times the steps that were seen."""

SPREADS, NEAR = 8.0, 7.0
"""Head-room of float16's forward pass, in standard deviations; asked for this near the limit."""
_TOP = DType.FLOAT16.limits.max_exponent + 1


def shadow(
    points: Sequence[ShadowPoint],
    noise: Sequence[NoisePoint],
    tolerance: Tolerance,
    roundoff: float = NOISE_ROUNDOFF,
) -> Check:
    """Check loss and gradient at the same weights, batch and random numbers.

    The loss may deviate by `tolerance.loss` or `tolerance.loss_null` times the null, the gradient
    by `tolerance.gradient` or what noise allows it, whichever is larger. The noise is bfloat16's;
    a format with a smaller `roundoff` answers for less of it, but not for less than `FLIPS`, and
    has `FINER_LOSS` of `tolerance.loss`. One of three or more checkpoints that fails, by no more
    than `PASSED_THROUGH` times, was passed through, and the trajectories judge it; but for the loss
    of the last one, after which nothing was seen.
    Whatever noise does, a gradient that is more than `tolerance.gradient` away at most checkpoints
    is another one. What fails may still be in `doubt`; see `Check`.
    """
    if not points:
        return Check(judged=False)
    finer = min(1.0, max(FLIPS, roundoff / NOISE_ROUNDOFF))
    scale = LOSS_FLOOR * abs(points[0].reference)
    null = finer * max((deviation(p.loss, p.reference, scale) for p in noise), default=0.0)
    errors_of_noise = [(p.step, finer * (p.gradient_error or 0.0)) for p in noise]
    gradient_null = max((error for _, error in errors_of_noise), default=0.0)
    deviations = [deviation(p.loss, p.reference, scale) for p in points]
    errors = [number(p.gradient_error) for p in points]
    gradient_limits = [_gradient_limit(p.step, errors_of_noise, tolerance) for p in points]
    numbers = Check(
        deviation=finite(max(deviations)),
        gradient_error=finite(max(errors)),
        noise=finite(null),
        gradient_noise=finite(gradient_null),
    )
    loss_limit = max(tolerance.loss * max(FINER_LOSS, finer), tolerance.loss_null * null)
    failed: list[Check] = []
    passing = len(points) > 2
    another = len(points) > 2 and _mostly(errors) > tolerance.gradient
    lost = another or any(e > limit for e, limit in zip(errors, gradient_limits, strict=True))
    signed = [_signed(p, d) for p, d in zip(points, deviations, strict=True)]
    doubt = _doubt(signed, loss_limit, errors, lost)
    rows = zip(points, deviations, errors, gradient_limits, strict=True)
    for point, difference, error, gradient_limit in rows:
        both = ((difference, loss_limit, "loss"), (error, gradient_limit, "gradient"))
        beyond = [(away, limit, what) for away, limit, what in both if away > limit]
        if beyond:
            away, limit, what = beyond[0]
            last = point.step == points[-1].step
            passing &= not failed and all(a <= PASSED_THROUGH * most for a, most, _ in beyond)
            passing &= not (last and what == "loss")
            problem = (
                f"at the same weights and batch of step {point.step} its {what} is "
                f"{percent(away)} away from float32's; {percent(limit)} is allowed"
            )
            failed.append(replace(numbers, problem=problem, step=point.step))
    if failed and not passing:
        return replace(failed[0], doubt=doubt)
    if another:
        problem = (
            f"at most of {len(points)} checkpoints its gradient is {percent(_mostly(errors))} or "
            f"more away from float32's; {percent(tolerance.gradient)} is allowed"
        )
        return replace(numbers, problem=problem, step=points[0].step, doubt=doubt)
    far = EXCUSED * tolerance.loss < max(deviations) <= loss_limit
    return replace(numbers, doubt="excused") if far else numbers


def delicate(noise: Sequence[NoisePoint], tolerance: Tolerance) -> bool:
    """Whether float32 itself does not bear noise of bfloat16's size, so that it excuses nothing.

    Chaos and convergence leave the gradient well defined at the earlier checkpoints. Where noise
    moves it by more than is allowed at most of them, the noise does what a broken precision does:
    as with a weight that multiplies positions far beyond 256.
    """
    largest: dict[int, float] = {}
    for point in noise:
        largest[point.step] = max(largest.get(point.step, 0.0), point.gradient_error or 0.0)
    return _mostly(list(largest.values())) > tolerance.gradient


def _signed(point: ShadowPoint, difference: float) -> float:
    """How far the loss is from float32's, below it as a negative number."""
    return -difference if number(point.loss) < point.reference else difference


def _doubt(signed: Sequence[float], limit: float, errors: Sequence[float], lost: bool) -> Doubt:
    """Whether what failed may be noise that training averages out; see `Check`.

    Rounding that is as often above as below does no harm where the gradients are right.
    """
    away = max(abs(difference) for difference in signed)
    both = min(max(signed), -min(signed)) >= limit / 2
    if both and not lost and away <= OUTRIGHT * limit:
        return "long"
    near = away <= PASSED_THROUGH * limit and math.isfinite(max(errors))
    return "near" if near else ""


def _mostly(errors: Sequence[float]) -> float:
    """What most errors reach: the lower median; 0 of none."""
    return sorted(errors)[(len(errors) - 1) // 2] if errors else 0.0


def _gradient_limit(step: int, noise: Sequence[tuple[int, float]], tolerance: Tolerance) -> float:
    """How far the gradient of a step may be away, relative to float32's.

    Noise elsewhere in the run never excuses a gradient that is lost: one that is all zero is away
    by exactly 1. Noise at the step itself may, where hardly any gradient is left to compare with.
    """
    here = max((error for other, error in noise if other == step), default=0.0)
    lost = min(0.9, tolerance.gradient_null * max((error for _, error in noise), default=0.0))
    return max(tolerance.gradient, lost, tolerance.gradient_null * here)


def headroom(points: Sequence[ShadowPoint], later: Sequence[ShadowPoint] = ()) -> Check:
    """Check that float16 numbers of the forward pass stay within float16's range.

    An overflow is to be expected, although the loss may not show it yet, where their largest
    magnitude has overflown since, grows towards the limit, or is near it and changes much from
    batch to batch. What is infinite from the start, as masks are, is left to the other tests.
    Where there are `later` points, growth is judged from the last of `points` on.
    """
    seen = [(p.step, _magnitude(p)) for p in (*points, *later) if _magnitude(p) > 0]
    since = points[-1].step if later else 1
    late = [(step, magnitude) for step, magnitude in seen if step >= since]
    if len(late) < 3:
        return Check(judged=False)
    three = (late[0], late[len(late) // 2], late[-1])
    restless = _restlessness([magnitude for _, magnitude in seen], NEAR, SPREADS)
    problem = _overflow(seen) or _growth(three) or restless
    return Check(problem=problem, step=late[-1][0] if problem else None)


def wants_later_look(points: Sequence[ShadowPoint]) -> bool:
    """Whether few checkpoints leave the head-room in doubt, so that more should be looked at."""
    if not headroom(points).passed:
        return True
    magnitudes = [_magnitude(p) for p in points if _magnitude(p) > 0]
    return len(magnitudes) > 2 and bool(_restlessness(magnitudes, 1.3 * NEAR, 3 * SPREADS))


def _overflow(seen: Sequence[tuple[int, float]]) -> str:
    """What is wrong with magnitudes of which a later one is infinite, and the first is not."""
    first, *later = seen
    beyond = [step for step, magnitude in later if math.isinf(magnitude)]
    if math.isinf(first[1]) or not beyond:
        return ""
    return (
        f"the largest float16 number of its forward pass, {first[1]:.3g} at step {first[0]}, is "
        f"infinite at step {beyond[0]}"
    )


def _growth(seen: Sequence[tuple[int, float]]) -> str:
    """What is wrong with magnitudes that grow: when they overflow.

    They are continued as the square of something that grows evenly, as weights under Adam do and
    squared activations with them; within `HORIZON` times the steps seen they must not pass 2**16.
    """
    (_, least), (before, less), (step, more) = seen
    if not least < less < more or math.isinf(more):
        return ""
    grew = f"the largest float16 number of its forward pass grew from {less:.3g} at step {before}"
    pace = (math.sqrt(more) - math.sqrt(less)) / (step - before)
    when = step + (math.sqrt(2.0**_TOP) - math.sqrt(more)) / pace
    if when > HORIZON * (step + 1):
        return ""
    return f"{grew} to {more:.3g} at step {step}; so it overflows by step {when:.0f}"


def _restlessness(magnitudes: Sequence[float], near: float, spreads: float) -> str:
    """What is wrong with magnitudes `near` the limit that change much between batches.

    In octaves, their mean must be `spreads` standard deviations below 2**16: by Cantelli's
    inequality, whatever their distribution, with eight one batch in 65 at most is beyond it. The
    deviation is von Neumann's, from one checkpoint to the next, which a trend does not widen.
    """
    if any(math.isinf(magnitude) for magnitude in magnitudes):
        return ""
    octaves = [math.log2(magnitude) for magnitude in magnitudes]
    steps = root_mean_square(b - a for a, b in itertools.pairwise(octaves))
    if max(octaves) < _TOP - near or mean(octaves) + spreads * steps / math.sqrt(2) < _TOP:
        return ""
    return (
        f"the largest float16 number of its forward pass varies from {min(magnitudes):.3g} to "
        f"{max(magnitudes):.3g} between batches, and float16 ends at 65504"
    )


def _magnitude(point: ShadowPoint) -> float:
    return math.inf if point.overflowed else point.largest or 0.0
