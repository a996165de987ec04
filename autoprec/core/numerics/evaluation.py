"""Compares what a model gives in evaluation with what it gives in float32, at the same weights.

Evaluation reads what the loss of training does not: running statistics, another branch, a decoder.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoprec.core.number_words import percent
from autoprec.core.numerics.single_step import MIN_NOISE_SHARE, NOISE_ROUNDOFF
from autoprec.core.numerics.tolerance import (
    Check,
    Tolerance,
    or_infinity,
)
from autoprec.core.numerics.traces import NoisyStep, StepComparison

NOTHING_LEFT = 1.0
"""Outputs that are further from float32's than they vary over the batch hold nothing of them.
Nearer ones are left to the loss: in healthy trainings they may be nine tenths of that away."""


def check_evaluation(
    points: Sequence[StepComparison],
    noise: Sequence[NoisyStep],
    tolerance: Tolerance,
    roundoff: float = NOISE_ROUNDOFF,
) -> Check:
    """Check the outputs in evaluation, at the checkpoints where there are any.

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
