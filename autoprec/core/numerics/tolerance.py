"""Types and arithmetic that the numerics tests share: tolerances, check results, loss distances."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autoprec.errors import UsageError

CERTAIN_DEVIATION = 1.0
"""A loss that ends this share above float32's, and matters, is not excused by chance, unless noise
moves float32 itself as far."""

SMALLEST_LOSS_SHARE = 3e-2
"""Losses below this share of the run's size count as this much when they divide."""


@dataclass(frozen=True)
class Tolerance:
    """How far a precision may be from float32 before it is said to differ.

    `loss`, `gradient`, `trajectory`, `metric` and `buffer` are relative deviations that are always
    allowed; the `_null` factors allow as many times what noise of half a bfloat16 digit does to
    float32.
    `skipped` is how many steps of one run the loss scaler may skip.
    """

    loss: float = 0.01
    loss_null: float = 4.0
    gradient: float = 0.5
    gradient_null: float = 4.0
    trajectory: float = 0.05
    trajectory_null: float = 5.0
    trajectory_slack: float = 0.001
    metric: float = 0.02
    metric_null: float = 3.0
    buffer: float = 0.2
    buffer_null: float = 5.0
    skipped: int = 2

    def scaled(self, factor: float) -> Tolerance:
        """Return a tolerance `factor` times as wide (below 1: tighter); `skipped` stays."""
        if not (math.isfinite(factor) and factor > 0):
            raise UsageError(
                f"tolerance {factor!r} given, expected a factor above 0: 1 is the default, 0.5 "
                "twice as strict, 2 twice as wide"
            )
        wider = {name: factor * value for name, value in vars(self).items() if name not in _KEPT}
        return replace(self, **wider)


#: What is no deviation, and so the same in a wider tolerance.
_KEPT = ("trajectory_slack", "skipped")

Undecided = Literal["", "both_signs", "near_limit", "noise_level"]


@dataclass(frozen=True)
class Check:
    """The outcome of one test: empty `problem` means passed; `judged` False, too little to tell.

    `undecided` is set if the single-step test alone cannot decide, so that training must:
    "both_signs" if losses deviate in both directions but gradients do not, which takes a long
    run; "near_limit" if everything that failed is close to what is allowed; and "noise_level"
    if it passed only because noise moves float32's own loss just as far.

    `noise` and `gradient_noise` are what noise does to `relative_deviation` and `gradient_error`;
    `value` and `reference` are the user's metric. `second_half` is the root mean square deviation
    of the single steps in a run's second half. `below` is the share of the first loss that both
    runs end below, where their difference is not compared; `excused` says what else made a
    difference pass that is more than is always allowed. `of_loss` says that `problem` tells shares
    of the loss.
    """

    judged: bool = True
    problem: str = ""
    of_loss: bool = False
    undecided: Undecided = ""
    step: int | None = None
    deviation: float | None = None
    gradient_error: float | None = None
    noise: float | None = None
    gradient_noise: float | None = None
    ratio: float | None = None
    second_half: float | None = None
    value: float | None = None
    reference: float | None = None
    skipped: int = 0
    below: float | None = None
    excused: str = ""

    @property
    def passed(self) -> bool:
        """Return whether nothing was found wrong."""
        return not self.problem


def chance(noise: float, factor: float) -> float:
    """Return how far a run may end from float32 by chance: `factor` times what noise does.

    Beyond `CERTAIN_DEVIATION` it is only as far as noise itself.
    """
    return min(factor * noise, max(CERTAIN_DEVIATION, noise))


def relative_deviation(loss: float | None, reference: float, floor: float) -> float:
    """Return how far a loss is from its reference, relative to the larger of that and `floor`."""
    difference = abs(or_infinity(loss) - reference)
    if difference == 0.0:
        return 0.0
    return difference / max(abs(reference), floor, 1e-30)


def size_of(losses: Sequence[float | None]) -> float:
    """Return the loss that tells whether others of its run are small: the first, mostly.

    Where training begins near zero and ends far above (a student that is its teacher's copy, an
    adapter that adds nothing yet) it is the largest.
    """
    sizes = [abs(loss) for loss in losses if loss is not None and math.isfinite(loss)]
    if not sizes:
        return 0.0
    end = mean(sizes[-max(1, len(sizes) // 5) :])
    return sizes[0] if sizes[0] >= SMALLEST_LOSS_SHARE * end else max(sizes)


def or_infinity(value: float | None) -> float:
    """Return the value, or infinity if it is unknown or NaN."""
    return math.inf if value is None or math.isnan(value) else value


def finite_or_none(value: float) -> float | None:
    """Return the value, or None if it is not finite: JSON knows no infinity."""
    return value if math.isfinite(value) else None


def mean(values: Iterable[float]) -> float:
    """Return the arithmetic mean."""
    items = list(values)
    return sum(items) / len(items)


def root_mean_square(values: Iterable[float]) -> float:
    """Return the root of the mean square; 0 of no values."""
    items = [value * value for value in values]
    return math.sqrt(sum(items) / len(items)) if items else 0.0
