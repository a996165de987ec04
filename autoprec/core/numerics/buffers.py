"""Tests what steps leave in a model's buffers: running statistics, sums, codebooks, averages.

Training often does not read them, so no loss shows that they are wrong. They are compared at the
same weights, batch and random numbers, as loss and gradient are; along two trainings they drift
apart with the weights (a running mean behind a bias that the loss does not feel moves at random).

A wrong buffer is one whose change differs by more than noise in the weights explains. A difference
that small may still decide what evaluation makes of a buffer: in `E[x^2] - E[x]^2` nearly all of
both sums cancels. That depends on code that nobody calls here, so what adds up rounded numbers is
named rather than judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from autoprec.core.numerics.single_step import MIN_NOISE_SHARE, NOISE_ROUNDOFF
from autoprec.core.numerics.tolerance import (
    Check,
    Tolerance,
    or_infinity,
    percent,
)
from autoprec.core.numerics.traces import NoisyStep, StepComparison

DECIDING_CHECKPOINTS = 2
"""A buffer is wrong where so many of the last checkpoints say so: one sample that changes sides
moves a sum once, and a sum kept in 16 bits loses its addends only once it is large."""

NAMED = 4
"""The most buffers that a sentence names."""


def check_buffers(
    points: Sequence[StepComparison],
    noise: Sequence[NoisyStep],
    tolerance: Tolerance,
    roundoff: float = NOISE_ROUNDOFF,
) -> Check:
    """Check that the same steps change a model's buffers as in float32.

    A change may differ by `tolerance.buffer` of its own size, or by `tolerance.buffer_null` times
    what noise does there; in a format with a smaller `roundoff` by less, but at least
    `MIN_NOISE_SHARE` of that. What is not finite fails at once.
    """
    compared = [point for point in points if point.buffers]
    if not compared:
        return Check(judged=False)
    for point in compared:
        broken = [each.name for each in point.buffers if each.error is None]
        if broken:
            verb = "are" if len(broken) > 1 else "is"
            problem = f"{_list(broken)} {verb} not finite after step {point.step}"
            return Check(problem=problem, step=point.step)
    finer = min(1.0, max(MIN_NOISE_SHARE, roundoff / NOISE_ROUNDOFF))
    excess: dict[str, float] = {}
    for point in compared[-DECIDING_CHECKPOINTS:]:
        allowed = {
            each.name: finer
            * max(tolerance.buffer, tolerance.buffer_null * _moved(each.name, point.step, noise))
            for each in point.buffers
        }
        errors = {each.name: or_infinity(each.error) for each in point.buffers}
        excess = {
            name: min(errors[name] / allowed[name], excess.get(name, math.inf)) for name in errors
        }
    wrong = sorted((name for name in excess if excess[name] > 1.0), key=lambda name: -excess[name])
    if not wrong:
        return Check(step=point.step)
    problem = (
        f"at the same weights, step {point.step} changes {_list(wrong)} otherwise than in float32: "
        f"{percent(errors[wrong[0]])} of the change away; {percent(allowed[wrong[0]])} is allowed"
    )
    return Check(problem=problem, step=point.step)


def rounded_buffers(points: Iterable[StepComparison]) -> tuple[str, ...]:
    """Name the buffers that add up numbers which had been rounded to 16 bits."""
    found = [each.name for point in points for each in point.buffers if each.rounded]
    return tuple(dict.fromkeys(found))


def describe_rounded(names: Sequence[str]) -> str:
    """Say what rounded addends mean for a buffer; empty where no buffer has any."""
    if not names:
        return ""
    return (
        f"{_list(names)} add{'s' if len(names) == 1 else ''} up numbers rounded to 16 bits: a "
        "small difference of such sums, as in E[x^2] - E[x]^2, may be lost"
    )


def _moved(name: str, step: int, noise: Iterable[NoisyStep]) -> float:
    """Return how far noise in the weights moves a buffer's change at a step."""
    return max(
        (
            or_infinity(each.error)
            for point in noise
            if point.step == step
            for each in point.buffers
            if each.name == name
        ),
        default=0.0,
    )


def _list(names: Sequence[str]) -> str:
    """Name buffers: "the buffer sums", "the buffers a, b, c, d and 3 more"."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"the buffer{'s' if len(names) > 1 else ''} {', '.join(names[:NAMED])}{more}"
