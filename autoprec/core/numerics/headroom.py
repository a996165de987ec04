"""Tests float16's head-room: whether numbers of the forward pass will overflow later."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from autoprec.core.dtypes import DType
from autoprec.core.numerics.tolerance import Check, mean, root_mean_square
from autoprec.core.numerics.traces import StepComparison

EXTRAPOLATION_FACTOR = 10
"""Growing magnitudes are extrapolated to this many times the steps that were observed."""

HEADROOM_DEVIATIONS, HEADROOM_OCTAVES = 8.0, 7.0
"""Within this many octaves of overflow, float16's forward pass needs this many standard deviations
of head-room."""

_OVERFLOW_EXPONENT = DType.FLOAT16.limits.max_exponent + 1


def check_headroom(points: Sequence[StepComparison], later: Sequence[StepComparison] = ()) -> Check:
    """Check that float16 numbers of the forward pass stay within float16's range.

    An overflow is to be expected, although the loss may not show it yet, if their largest
    magnitude has overflowed since the start, grows towards the limit, or is near it and varies much
    between batches. What is infinite from the start, as masks are, is left to the other tests.
    If there are `later` points, growth is judged from the last of `points` on.
    """
    magnitudes = [
        (p.step, _largest_magnitude(p)) for p in (*points, *later) if _largest_magnitude(p) > 0
    ]
    since = points[-1].step if later else 1
    late = [(step, magnitude) for step, magnitude in magnitudes if step >= since]
    if len(late) < 3:
        return Check(judged=False)
    three = (late[0], late[len(late) // 2], late[-1])
    varying = _variation_problem(
        [magnitude for _, magnitude in magnitudes], HEADROOM_OCTAVES, HEADROOM_DEVIATIONS
    )
    problem = _overflow_problem(magnitudes) or _growth_problem(three) or varying
    return Check(problem=problem, step=late[-1][0] if problem else None)


def needs_later_checkpoints(points: Sequence[StepComparison]) -> bool:
    """Return whether few checkpoints leave the head-room uncertain, so that more are needed."""
    if not check_headroom(points).passed:
        return True
    magnitudes = [_largest_magnitude(p) for p in points if _largest_magnitude(p) > 0]
    return len(magnitudes) > 2 and bool(
        _variation_problem(magnitudes, 1.3 * HEADROOM_OCTAVES, 3 * HEADROOM_DEVIATIONS)
    )


def _overflow_problem(magnitudes: Sequence[tuple[int, float]]) -> str:
    """Say what is wrong if a later magnitude is infinite and the first is not; else nothing."""
    first, *later = magnitudes
    beyond = [step for step, magnitude in later if math.isinf(magnitude)]
    if math.isinf(first[1]) or not beyond:
        return ""
    return (
        f"the largest float16 number of its forward pass, {first[1]:.3g} at step {first[0]}, is "
        f"infinite at step {beyond[0]}"
    )


def _growth_problem(magnitudes: Sequence[tuple[int, float]]) -> str:
    """Say when growing magnitudes overflow, if that is soon; else nothing.

    They are extrapolated as the square of something that grows evenly, as weights under Adam do and
    squared activations with them. They must not pass 2**16 within `EXTRAPOLATION_FACTOR` times the
    steps observed.
    """
    (_, least), (before, less), (step, more) = magnitudes
    if not least < less < more or math.isinf(more):
        return ""
    grew = f"the largest float16 number of its forward pass grew from {less:.3g} at step {before}"
    growth = (math.sqrt(more) - math.sqrt(less)) / (step - before)
    overflow_step = step + (math.sqrt(2.0**_OVERFLOW_EXPONENT) - math.sqrt(more)) / growth
    if overflow_step > EXTRAPOLATION_FACTOR * (step + 1):
        return ""
    return f"{grew} to {more:.3g} at step {step}; so it overflows by step {overflow_step:.0f}"


def _variation_problem(magnitudes: Sequence[float], near: float, spreads: float) -> str:
    """Say what is wrong with magnitudes `near` the limit that vary much between batches.

    In octaves, their mean must be `spreads` standard deviations below 2**16: with eight, by
    Cantelli's inequality, at most one batch in 65 exceeds it, whatever the distribution. The
    deviation is von Neumann's, between successive checkpoints, which a trend does not widen.
    """
    if any(math.isinf(magnitude) for magnitude in magnitudes):
        return ""
    octaves = [math.log2(magnitude) for magnitude in magnitudes]
    steps = root_mean_square(b - a for a, b in itertools.pairwise(octaves))
    if (
        max(octaves) < _OVERFLOW_EXPONENT - near
        or mean(octaves) + spreads * steps / math.sqrt(2) < _OVERFLOW_EXPONENT
    ):
        return ""
    return (
        f"the largest float16 number of its forward pass varies from {min(magnitudes):.3g} to "
        f"{max(magnitudes):.3g} between batches, and float16 ends at 65504"
    )


def _largest_magnitude(point: StepComparison) -> float:
    return math.inf if point.overflowed else point.largest or 0.0
