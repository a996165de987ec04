"""Compares what a step leaves in a model's buffers: running statistics, sums, codebooks, averages.

Evaluation reads them, the loss of training often does not. Of each buffer only what changes in a
float32 step is compared. Values are vectors of float64, in whatever array type the framework has.
"""

from __future__ import annotations

import math
import re
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

SMALLEST_CHANGE = 0.06
"""A change counts as at least this share of the buffer's size: what has converged hardly moves.

The size of a mean is at least the deviation beside it: a mean of centred numbers is all rounding.
"""

SCALE = 0.6180339887
"""Buffers are scaled by this to see what a step adds to them: it gives few numbers of 16 bits."""

STALLING = 4.0
"""A sum kept in a 16-bit format stalls where a step replaces less of it than so many roundoffs."""

_LAST_NAME = r"[^./]*$"
_VARIANCE = r"[^./]*var[^./]*"
_MOST_ADDENDS = 2**12
_CHANCE_BITS = 12.0
_FLOAT32_ROUNDOFF = 2.0**-24
_ROUNDINGS = 4.0
"""What float32 buffers hold is exact to this many roundings."""


class HoldsBuffers(Protocol):
    """What a model under a recipe shows of its floating-point buffers."""

    def buffers(self, state: Any = None, *, exact: bool = False) -> Values:
        """Return those of a copied state; without one, those that the last batch left.

        With `exact`, those of whole numbers and truth values as well, where that is known.
        """

    def scale_buffers(self, state: Any, names: Collection[str], factor: float) -> Any:
        """Return a copied state with these buffers multiplied by a factor."""


@dataclass(frozen=True)
class StepBuffers:
    """The buffers before a step and after it, and after the same step from `SCALE` times their own.

    The last is empty where it was not looked at.
    """

    before: Values = field(default_factory=dict)
    after: Values = field(default_factory=dict)
    from_scaled: Values = field(default_factory=dict)

    @staticmethod
    def left_by(
        trainee: HoldsBuffers, state: Any, *, exact: bool = False, after: Values | None = None
    ) -> StepBuffers:
        """Return what the step that the trainee just took from `state` left, or left as `after`.

        What the step made counts from zero.
        """
        before = trainee.buffers(state, exact=exact)
        after = trainee.buffers(exact=exact) if after is None else after
        made = {name: values - values for name, values in after.items() if name not in before}
        return StepBuffers({**before, **made}, after)

    @property
    def changed(self) -> tuple[str, ...]:
        """Name the buffers that the step changed."""
        return tuple(
            name
            for name, values in self.after.items()
            if name in self.before and len(values) == len(self.before[name])
            if _distance(values, self.before[name]) != 0.0
        )

    def compared_with(
        self, reference: StepBuffers, dtype: DType = DType.FLOAT32
    ) -> tuple[BufferUpdate, ...]:
        """Say how far the changes are from a reference's, from the same state.

        `dtype` is the format that this step computes in.
        """
        return tuple(
            self._compared(name, reference, dtype)
            for name in reference.changed
            if name in self.after and len(self.after[name]) == len(reference.after[name])
            if math.isfinite(_norm(reference.before[name]) + _norm(reference.after[name]))
        )

    def _compared(self, name: str, reference: StepBuffers, dtype: DType) -> BufferUpdate:
        before, after, exact = reference.before[name], self.after[name], reference.after[name]
        size = max(_norm(exact), _deviation(name, reference.after))
        change = max(_distance(exact, before), SMALLEST_CHANGE * size)
        error = _distance(after, exact) / change
        ours, theirs = self._accumulation(name), reference._accumulation(name)
        stalls = ours.stalls_in(dtype) and not theirs.is_kept_in(dtype)
        return BufferUpdate(
            name,
            error if math.isfinite(error) else None,
            rounded=stalls or (ours.adds_rounded(dtype) and not theirs.adds_rounded(dtype)),
            stalls=stalls,
        )

    def _accumulation(self, name: str) -> Accumulation:
        if name not in self.from_scaled:
            return Accumulation()
        return Accumulation.of(self.before[name], self.after[name], self.from_scaled[name])


@dataclass(frozen=True)
class Accumulation:
    """How a buffer accumulates: it keeps a share of every value, and adds something to it.

    `sums` are what it becomes and `addends` what is added, each with its error. Values that a step
    replaces are left out.
    """

    share: float = 0.0
    sums: tuple[tuple[float, float], ...] = ()
    addends: tuple[tuple[float, float], ...] = ()

    @staticmethod
    def of(before: Any, after: Any, from_scaled: Any) -> Accumulation:
        """Read it off two steps with the same batch: what they do alike is what is added."""
        rows = list(zip(*(_first(each) for each in (before, after, from_scaled)), strict=True))
        kept = [row for row in rows if all(map(math.isfinite, row)) and row[0] and row[1] != row[2]]
        shares, sums, addends = [], [], []
        for old, new, other in kept:
            size = _FLOAT32_ROUNDOFF * max(abs(new), abs(other))
            added = (other - SCALE * new) / (1.0 - SCALE)
            error = _ROUNDINGS * size / (1.0 - SCALE)
            if abs(added) > error:
                shares.append((new - other) / (1.0 - SCALE) / old)
                sums.append((other, 0.0))
                addends.append((added, error))
        if not shares:
            return Accumulation()
        return Accumulation(statistics.median(shares), tuple(sums), tuple(addends))

    def adds_rounded(self, dtype: DType) -> bool:
        """Say whether what is added was rounded to `dtype` first.

        A moving average adds what it does not keep times a number, which may be the rounded one.
        """
        weights = (1.0, 1.0 - self.share)
        return any(_are_rounded(self.addends, w, dtype) for w in weights if abs(w) > 1e-6)

    def is_kept_in(self, dtype: DType) -> bool:
        """Say whether the buffer itself is rounded to `dtype` in every step."""
        return _are_rounded(self.sums, 1.0, dtype)

    def stalls_in(self, dtype: DType) -> bool:
        """Say whether it is kept in `dtype`, and a step adds too little to be kept for long."""
        lasting = self.share > 1.0 - STALLING * dtype.limits.unit_roundoff
        return lasting and self.is_kept_in(dtype)


def _deviation(name: str, buffers: Values) -> float:
    """Return the norm of the deviations whose squares a buffer's neighbour holds; 0 without one.

    A neighbour is as long and in the same module, and called a variance: `running_var`.
    """
    module = re.split(_LAST_NAME, name)[0]
    variances = [
        float(abs(values).sum())
        for other, values in buffers.items()
        if re.fullmatch(re.escape(module) + _VARIANCE, other)
        if other != name and len(values) == len(buffers[name])
    ]
    return math.sqrt(max(variances, default=0.0))


def _distance(values: Any, others: Any) -> float:
    """Return the norm of the difference; infinity where a value is not finite."""
    if not math.isfinite(_norm(values) + _norm(others)):
        return math.inf
    return _norm(values - others)


def _norm(values: Any) -> float:
    return math.sqrt(float((values * values).sum()))


def _first(values: Any) -> list[float]:
    found: list[float] = values[:_MOST_ADDENDS].tolist()
    return found


def _are_rounded(values: Iterable[tuple[float, float]], weight: float, dtype: DType) -> bool:
    """Say whether all values, divided by `weight`, are numbers of a 16-bit format, not by chance.

    Each comes with its error; the weight is known to a few float32 roundings unless it is 1.
    """
    limits, unlikely = dtype.limits, 0.0
    if limits.bits != 16:
        return False
    weight_error = 0.0 if weight == 1.0 else _ROUNDINGS * _FLOAT32_ROUNDOFF / abs(weight)
    for value, error in values:
        number = abs(value / weight)
        exponent = max(math.floor(math.log2(number)), limits.min_exponent) if number else 0
        spacing = 2.0 ** (exponent - limits.mantissa_bits)
        allowed = max(error / abs(weight) + number * weight_error, _FLOAT32_ROUNDOFF * number)
        if abs(number - spacing * round(number / spacing)) > allowed:
            return False
        unlikely += math.log2(max(1.0, spacing / (2.0 * allowed))) if number else 0.0
    return unlikely >= _CHANCE_BITS
