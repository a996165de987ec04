"""Tests what steps leave in a model's buffers: running statistics, sums, codebooks, averages.

Training often does not read them, so no loss shows that they are wrong. They are compared at the
same weights, batch and random numbers, as loss and gradient are; along two trainings they drift
apart with the weights (a running mean behind a bias that the loss does not feel moves at random).

A wrong buffer is one whose change differs by more than noise in the weights explains. A difference
that small may still decide what evaluation makes of a buffer: in `E[x^2] - E[x]^2` nearly all of
both sums cancels. That depends on code that nobody calls here, so what adds up rounded numbers is
named rather than judged. A sum that is itself rounded in every step is wrong sooner or later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autoprec.core.number_words import percent
from autoprec.core.numerics.single_step import MIN_NOISE_SHARE, NOISE_ROUNDOFF
from autoprec.core.numerics.tolerance import Tolerance, or_infinity
from autoprec.core.numerics.traces import NoisyStep, StepComparison

DECIDING_CHECKPOINTS = 2
"""A buffer is wrong if so many of the last checkpoints say so: one sample that changes sides
moves a sum once, and a sum kept in 16 bits loses its addends only once it is large."""

NAMED = 4
"""The most buffers that a sentence names."""


@dataclass(frozen=True)
class BufferCheck:
    """The outcome: empty `problem` means passed; `judged` False, no buffer was compared.

    `differing` differ at too few checkpoints to fail, and `rounded` add up rounded numbers.
    """

    judged: bool = True
    problem: str = ""
    step: int | None = None
    differing: tuple[str, ...] = ()
    rounded: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Return whether nothing was found wrong."""
        return not self.problem

    def describe(self) -> str:
        """Say what is to be known of buffers that passed; empty if there is nothing."""
        parts = []
        if self.differing:
            parts.append(
                f"{_list(self.differing)} did not change as in float32 at one of the checkpoints"
            )
        if self.rounded:
            verb = "add up" if len(self.rounded) > 1 else "adds up"
            parts.append(
                f"{_list(self.rounded)} {verb} numbers rounded to 16 bits: a small difference of "
                "such sums, as in E[x^2] - E[x]^2, may be lost"
            )
        return "; ".join(parts)


def check_buffers(
    points: Sequence[StepComparison],
    noise: Sequence[NoisyStep],
    tolerance: Tolerance,
    roundoff: float = NOISE_ROUNDOFF,
) -> BufferCheck:
    """Check that the same steps change a model's buffers as in float32.

    A change may differ by `tolerance.buffer` of its own size, or by `tolerance.buffer_null` times
    what noise does there, of which a format with a smaller `roundoff` has less, but at least
    `MIN_NOISE_SHARE`. What is not finite, and a lasting sum that is kept in 16 bits, fails
    at any checkpoint.
    """
    compared = [point for point in points if point.buffers]
    if not compared:
        return BufferCheck(judged=False)
    for point in compared:
        broken = [each.name for each in point.buffers if each.error is None]
        stalled = [each.name for each in point.buffers if each.stalls]
        if broken:
            problem = f"step {point.step} makes {_list(broken)} inf or NaN"
            return BufferCheck(problem=problem, step=point.step)
        if stalled:
            problem = (
                f"{_list(stalled)} {'are' if len(stalled) > 1 else 'is'} rounded to 16 bits in "
                "every step: once large, such a sum loses what is added to it"
            )
            return BufferCheck(problem=problem, step=point.step)
    finer = min(1.0, max(MIN_NOISE_SHARE, roundoff / NOISE_ROUNDOFF))
    shares: dict[str, list[float]] = {}
    for point in compared[-DECIDING_CHECKPOINTS:]:
        for each in point.buffers:
            moved = tolerance.buffer_null * _moved(each.name, point.step, noise)
            allowed = max(tolerance.buffer, finer * moved)
            shares.setdefault(each.name, []).append(or_infinity(each.error) / allowed)
    wrong = [name for name, excess in shares.items() if min(excess) > 1.0]
    if not wrong:
        differing = tuple(name for name, excess in shares.items() if max(excess) > 1.0)
        rounded = [each.name for point in compared for each in point.buffers if each.rounded]
        return BufferCheck(differing=differing, rounded=tuple(dict.fromkeys(rounded)))
    errors = {each.name: or_infinity(each.error) for point in compared for each in point.buffers}
    wrong.sort(key=lambda name: -errors[name])
    problem = (
        f"at the same weights, step {point.step} changes {_list(wrong)} otherwise than float32 "
        f"does, by {percent(errors[wrong[0]])} of the change"
    )
    return BufferCheck(problem=problem, step=point.step)


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
