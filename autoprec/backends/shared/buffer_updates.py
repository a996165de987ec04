"""Compares what a step leaves in a model's buffers: running statistics, sums, codebooks, averages.

Evaluation reads them, the loss of training often does not. Of each buffer only what changes in a
float32 step is compared. Values are vectors of float64, in whatever array type the framework has.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from autoprec.core.dtypes import DType
from autoprec.core.numerics.traces import BufferUpdate

Values = Mapping[str, Any]
"""The values of floating-point buffers, by name."""

MOST_VALUES = 2**20
"""Of a larger buffer so many values are compared, spread evenly."""

SMALLEST_CHANGE = 0.03
"""A change counts as at least this share of the buffer's size: what has converged hardly moves."""

_MOST_ADDENDS = 2**12
_CHANCE_BITS = 12.0
_FLOAT32_ROUNDOFF = 2.0**-24
_ROUNDINGS = 3.0
"""Addends read from float32 buffers are exact to this many roundings."""


class HoldsBuffers(Protocol):
    """What a model under a recipe shows of its floating-point buffers."""

    def buffers(self, state: Any = None) -> Values:
        """Return those of a copied state; without one, those that the last batch left."""

    def halve_buffers(self, state: Any, names: Collection[str]) -> Any:
        """Return a copied state with these buffers at half their values."""


@dataclass(frozen=True)
class StepBuffers:
    """The buffers before a step and after it, and after the same step `from_half` their values.

    The last is empty where it was not looked at.
    """

    before: Values = field(default_factory=dict)
    after: Values = field(default_factory=dict)
    from_half: Values = field(default_factory=dict)

    @staticmethod
    def left_by(trainee: HoldsBuffers, state: Any) -> StepBuffers:
        """Return what the step that the trainee just took from `state` left."""
        return StepBuffers(trainee.buffers(state), trainee.buffers())

    @property
    def changed(self) -> tuple[str, ...]:
        """Name the buffers that the step changed."""
        return tuple(
            name
            for name, values in self.after.items()
            if name in self.before and len(values) == len(self.before[name])
            if _norm(values - self.before[name]) != 0.0
        )

    def compared_with(
        self, reference: StepBuffers, dtype: DType = DType.FLOAT32
    ) -> tuple[BufferUpdate, ...]:
        """Say how far the changes are from a reference's, from the same state.

        `dtype` is the format that this step computes in.
        """
        return tuple(
            BufferUpdate(
                name,
                _relative_error(reference.before[name], self.after[name], reference.after[name]),
                self._adds_rounded(name, dtype) and not reference._adds_rounded(name, dtype),
            )
            for name in reference.changed
            if name in self.after and len(self.after[name]) == len(reference.after[name])
            if math.isfinite(_norm(reference.after[name]))
        )

    def _adds_rounded(self, name: str, dtype: DType) -> bool:
        if dtype.limits.bits != 16 or name not in self.from_half:
            return False
        return adds_rounded_numbers(
            self.before[name], self.after[name], self.from_half[name], dtype
        )


def _relative_error(before: Any, after: Any, reference: Any) -> float | None:
    """Return the size of the difference relative to the reference's change; None: not finite."""
    change = max(_norm(reference - before), SMALLEST_CHANGE * _norm(reference))
    error = _norm(after - reference) / (change or 1.0)
    return error if math.isfinite(error) else None


def _norm(values: Any) -> float:
    return math.sqrt(float((values * values).sum()))


def adds_rounded_numbers(before: Any, after: Any, from_half: Any, dtype: DType) -> bool:
    """Say whether what a step adds to a buffer was rounded to `dtype` first.

    `after` is what one step made of the buffer, `from_half` what the same step makes of half of it.
    Where it keeps a share of the old values and adds something, that is `2 * from_half - after`:
    the number added, or the rest of the share of a new one, as in a moving average. All of them are
    numbers of `dtype` only if they were rounded to it. Values that are replaced add nothing up.
    """
    rows = list(zip(_first(before), _first(after), _first(from_half), strict=True))
    kept = [row for row in rows if all(map(math.isfinite, row)) and row[0] and row[1] != row[2]]
    if not kept:
        return False
    share = statistics.median(2 * (after - half) / before for before, after, half in kept)
    addends = [
        (2 * half - after, _ROUNDINGS * _FLOAT32_ROUNDOFF * (abs(after) + 2 * abs(half)))
        for _, after, half in kept
    ]
    addends = [(value, error) for value, error in addends if abs(value) > error]
    weights = (1.0, 1.0 - share)
    return any(_are_rounded(addends, weight, dtype) for weight in weights if abs(weight) > 1e-6)


def _first(values: Any) -> list[float]:
    found: list[float] = values[:_MOST_ADDENDS].tolist()
    return found


def _are_rounded(addends: Iterable[tuple[float, float]], weight: float, dtype: DType) -> bool:
    """Say whether all values, divided by `weight`, are numbers of `dtype`, and not by chance.

    Each comes with its error; the weight is known to a float32 rounding unless it is 1.
    """
    weight_error = 0.0 if weight == 1.0 else _ROUNDINGS * _FLOAT32_ROUNDOFF / abs(weight)
    limits, unlikely = dtype.limits, 0.0
    for value, error in addends:
        number = abs(value / weight)
        allowed = error / abs(weight) + number * weight_error
        exponent = max(math.floor(math.log2(number)), limits.min_exponent)
        spacing = 2.0 ** (exponent - limits.mantissa_bits)
        if abs(number - spacing * round(number / spacing)) > allowed:
            return False
        unlikely += math.log2(max(1.0, spacing / (2 * allowed)))
    return unlikely >= _CHANCE_BITS
