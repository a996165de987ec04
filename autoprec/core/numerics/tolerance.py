"""What the judge's tests share: how much is allowed, what a test found, and distances of losses."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from autoprec.errors import UsageError

LOSS_FLOOR = 3e-2
"""Losses below this share of the first one count as this much when they divide."""


@dataclass(frozen=True)
class Tolerance:
    """How far a precision may be from float32 before it is said to differ.

    `loss`, `gradient`, `trajectory` and `metric` are relative deviations that are always allowed;
    the `_null` factors allow as many times what noise of half a bfloat16 digit does to float32.
    `skipped` is how many steps of one run the loss scaler may throw away.
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
    skipped: int = 2

    def scaled(self, factor: float) -> Tolerance:
        """A tolerance `factor` times as wide; below 1 it is tighter. Skipped steps stay."""
        if not (math.isfinite(factor) and factor > 0):
            raise UsageError(
                f"tolerance {factor!r} given, expected a factor above 0: 1 is the default, 0.5 "
                "twice as strict, 2 twice as wide"
            )
        return replace(
            self,
            loss=self.loss * factor,
            loss_null=self.loss_null * factor,
            gradient=self.gradient * factor,
            gradient_null=self.gradient_null * factor,
            trajectory=self.trajectory * factor,
            trajectory_null=self.trajectory_null * factor,
            metric=self.metric * factor,
            metric_null=self.metric_null * factor,
        )


Doubt = Literal["", "long", "near", "excused"]


@dataclass(frozen=True)
class Check:
    """The outcome of one test: empty `problem` means passed; `judged` False, too little to tell.

    `doubt` says that what a shadow test failed may be noise, which training must decide: a "long"
    run where losses are off in both directions, but gradients are not; the usual ones where
    everything is "near". And "excused" that it passed only because noise moves float32's loss very
    far, too.

    `noise` and `gradient_noise` are what noise does to `deviation` and `gradient_error`; `value`
    and `reference` are the user's metric. `late` is the root mean square of how far the single
    steps of a run's second half deviate.
    """

    judged: bool = True
    problem: str = ""
    doubt: Doubt = ""
    step: int | None = None
    deviation: float | None = None
    gradient_error: float | None = None
    noise: float | None = None
    gradient_noise: float | None = None
    ratio: float | None = None
    late: float | None = None
    value: float | None = None
    reference: float | None = None
    skipped: int = 0

    @property
    def passed(self) -> bool:
        """Whether nothing was found wrong."""
        return not self.problem


def deviation(loss: float | None, reference: float, floor: float) -> float:
    """How far a loss is from its reference, relative to that or to `floor` if it is larger."""
    difference = abs(number(loss) - reference)
    if difference == 0.0:
        return 0.0
    return difference / max(abs(reference), floor, 1e-30)


def number(value: float | None) -> float:
    """The value, infinity where it is unknown or NaN."""
    return math.inf if value is None or math.isnan(value) else value


def finite(value: float) -> float | None:
    """The value, None where it is not finite: what a plain value can hold."""
    return value if math.isfinite(value) else None


def mean(values: Iterable[float]) -> float:
    """The arithmetic mean."""
    items = list(values)
    return sum(items) / len(items)


def root_mean_square(values: Iterable[float]) -> float:
    """The root of the mean square; 0 of nothing."""
    items = [value * value for value in values]
    return math.sqrt(sum(items) / len(items)) if items else 0.0


def percent(value: float) -> str:
    """A share as people read it."""
    return f"{100 * value:.2g} %" if math.isfinite(value) else "infinitely far"
