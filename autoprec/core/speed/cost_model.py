"""Predicts the throughput and memory of untried recipes.

A training step takes close to a + c * b for a micro-batch of b samples, so throughput follows
log r(b) = const + log(b / (b + h)), where h = a / c is the batch at which half of the step is
overhead. On top of that law lies a Gaussian process over log throughput: every level of every
factor (policy, layout, compile, ...) has an offset of its own and a slow drift over octaves of the
batch, so that a point measured at one level teaches about the others. h is not fitted but averaged
over a grid by marginal likelihood. Only the standard library is used: histories are short.

The scales below are prior knowledge in units of log throughput (0.1 is 10 %), chosen before any
benchmark and kept wide: a policy may be five times faster or slower, a layout seldom moves more
than a third.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import eq, mul

from autoprec.core.recipe import KEEP_MEMORY, KnobValue
from autoprec.core.speed.space import BATCH, Point

#: (offset, drift) of a factor's levels, as standard deviations of log throughput.
#: `_POLICY_COMPILE_SCALE` is the same for policy and compiler together: a compiler may lose what a
#: policy wins.
_FACTOR_SCALES: Mapping[str, tuple[float, float]] = {
    "policy": (0.6, 0.45),
    "memory_format": (0.15, 0.05),
    "compile": (0.35, 0.12),
    "threads": (0.35, 0.08),
    "steps_per_execution": (0.15, 0.10),
    "alignment": (0.15, 0.05),
    "keep_memory": (0.35, 0.10),
    "reduce_dtype": (0.25, 0.10),
    "float8": (0.20, 0.10),
    "attention": (0.15, 0.10),
    "compile_mode": (0.35, 0.12),
}
_DEFAULT_SCALE = (0.08, 0.03)

#: Factors that can decide a search by themselves.
MAJOR_FACTORS = ("policy", "memory_format", "compile", "reduce_dtype", "float8")
_COMMON_DRIFT = 0.12
_DRIFT_OCTAVES = 4.0
_POLICY_COMPILE_SCALE = (0.15, 0.15)
_ROUGHNESS, _ROUGH_OCTAVES = 0.03, 1.5

#: How far a timing is off beside what its own steps say, as sessions and processes differ. Replays
#: of recorded grids (benchmarks/search/replay.py) lost 0.15 % of speed with it, with a quarter of
#: the trials disturbed 0.51 %; with 0.015, and over the fastest timing, 0.28 and 0.70 %.
_TIMING_NOISE = 0.05
_MEAN_DEVIATION = 10.0

#: An arm's memory may grow with the batch this many times as fast as another arm's.
_MEMORY_GROWTH_FACTOR = 2.0
_MEMORY_MARGIN_SHARE, _KEPT_MEMORY_MARGIN_SHARE = 0.10, 0.25
_HALF_BATCHES = (0.01, 1.0, 4.0, 16.0, 64.0, 256.0, 1024.0)


@dataclass(frozen=True)
class Prediction:
    """Log throughput (samples per second) of a point: mean and standard deviation."""

    mean: float
    deviation: float

    def expected_gain(self, best: float) -> float:
        """Return the expected improvement over a log throughput of `best`, in log units."""
        if self.deviation <= 0:
            return max(0.0, self.mean - best)
        z = (self.mean - best) / self.deviation
        density = math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        below = 0.5 * math.erfc(-z / math.sqrt(2))
        return max(0.0, (self.mean - best) * below + self.deviation * density)


@dataclass(frozen=True)
class MeasuredRate:
    """A point with its measured log throughput and that measurement's standard deviation."""

    point: Point
    log_rate: float
    deviation: float = 0.0


def _overhead_law(batch: float, half: float) -> float:
    return math.log(batch / (batch + half))


def _factor_covariance(name: str, near: float) -> float:
    """Return the covariance of a factor's level at two batches that share so much of a drift."""
    offset, drift = _FACTOR_SCALES.get(name, _DEFAULT_SCALE)
    return offset**2 + drift**2 * near


def _batch_kernels(left: float, right: float) -> tuple[float, float]:
    """Return how much of a drift two batches share, and the covariance of one arm's roughness."""
    octaves = abs(math.log2(left / right))
    rough = _ROUGHNESS**2 * math.exp(-octaves / _ROUGH_OCTAVES)
    return _smooth(octaves / _DRIFT_OCTAVES), rough


def _smooth(distance: float) -> float:
    """Return the Matern 5/2 kernel: throughput is smooth in the logarithm of the batch."""
    scaled = math.sqrt(5) * distance
    return (1 + scaled + scaled**2 / 3) * math.exp(-scaled)


@lru_cache(maxsize=2**16)  # the batches and factors of a space are few, its pairs are many
def _covariance(
    left_batch: float, right_batch: float, names: tuple[str, ...], same: tuple[bool, ...]
) -> float:
    """Return the covariance of two points, of whose factors these have the same level."""
    near, rough = _batch_kernels(left_batch, right_batch)
    total = _MEAN_DEVIATION**2 + _COMMON_DRIFT**2 * near
    shared = {name for name, is_same in zip(names, same, strict=True) if is_same}
    for name in names:
        if name in shared:
            total += _factor_covariance(name, near)
    if {"policy", "compile"} <= shared:
        total += _POLICY_COMPILE_SCALE[0] ** 2 + _POLICY_COMPILE_SCALE[1] ** 2 * near
    return total + (rough if all(same) else 0.0)


def _cholesky(matrix: list[list[float]]) -> list[list[float]]:
    """Return the factor of a symmetric matrix, of which the lower triangle is read."""
    size = len(matrix)
    lower = [[0.0] * size for _ in range(size)]
    for i in range(size):
        for j in range(i + 1):
            rest = matrix[i][j] - sum(map(mul, lower[i][:j], lower[j]))
            lower[i][j] = math.sqrt(max(rest, 1e-12)) if i == j else rest / lower[j][j]
    return lower


def _forward(lower: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    solved: list[float] = []
    for value, row in zip(values, lower, strict=True):
        known = sum(map(mul, row, solved))  # as far as `solved` goes
        solved.append((value - known) / row[len(solved)])
    return solved


def _backward(lower: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    size = len(lower)
    columns = list(zip(*lower, strict=True))
    solved = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(map(mul, columns[i][i + 1 :], solved[i + 1 :]))
        solved[i] = (values[i] - rest) / lower[i][i]
    return solved


class ThroughputModel:
    """Predicts throughput everywhere in the space from the measured points."""

    def __init__(self, measured: Sequence[MeasuredRate]) -> None:
        if not measured:
            raise ValueError("a throughput model needs at least one measured point")
        self._measured = tuple(measured)
        self._names = tuple(name for name in measured[0].point if name != BATCH)
        self._located = [self._locate(item.point) for item in measured]
        self._centre = sum(item.log_rate for item in measured) / len(measured)

    def _locate(self, point: Point) -> tuple[float, list[KnobValue]]:
        """Return a point's batch and its levels of the other factors, in the order of `_names`."""
        return float(point[BATCH]), [point[name] for name in self._names]

    def _covariances(
        self,
        located: tuple[float, list[KnobValue]],
        others: Sequence[tuple[float, list[KnobValue]]],
    ) -> list[float]:
        batch, levels = located
        return [
            _covariance(batch, other_batch, self._names, tuple(map(eq, levels, other_levels)))
            for other_batch, other_levels in others
        ]

    @cached_property
    def _lower(self) -> list[list[float]]:
        matrix = [
            self._covariances(located, self._located[: number + 1])
            for number, located in enumerate(self._located)
        ]
        for i, item in enumerate(self._measured):
            matrix[i][i] += _TIMING_NOISE**2 + item.deviation**2
        return _cholesky(matrix)

    @cached_property
    def _laws(self) -> list[tuple[float, float, list[float]]]:
        """For each half-batch: its value, its posterior weight, and the solved residuals."""
        found = []
        for half in _HALF_BATCHES:
            residuals = [
                item.log_rate - self._centre - _overhead_law(float(item.point[BATCH]), half)
                for item in self._measured
            ]
            whitened = _forward(self._lower, residuals)
            found.append(
                (half, -0.5 * sum(w * w for w in whitened), _backward(self._lower, whitened))
            )
        top = max(weight for _, weight, _ in found)
        total = sum(math.exp(weight - top) for _, weight, _ in found)
        return [(half, math.exp(weight - top) / total, solved) for half, weight, solved in found]

    def predict(self, point: Point) -> Prediction:
        """Predict the log throughput at `point`."""
        located = self._locate(point)
        row = self._covariances(located, self._located)
        (own,) = self._covariances(located, [located])
        whitened = _forward(self._lower, row)
        variance = max(own - sum(map(mul, whitened, whitened)), 1e-12)
        means = [
            (
                weight,
                self._centre
                + _overhead_law(float(point[BATCH]), half)
                + sum(map(mul, row, solved)),
            )
            for half, weight, solved in self._laws
        ]
        mean = sum(weight * value for weight, value in means)
        between = sum(weight * (value - mean) ** 2 for weight, value in means)
        return Prediction(mean, math.sqrt(variance + between))


@dataclass(frozen=True)
class MeasuredMemory:
    """The peak memory of a measured point."""

    point: Point
    peak_bytes: int


def predict_memory(point: Point, measured: Sequence[MeasuredMemory]) -> float | None:
    """Return an upper estimate of a point's peak memory in bytes; None where nothing was measured.

    Peak memory is affine in the micro-batch. From two batches of the same arm the line is known;
    from one, memory grows at most in proportion to the batch, and at most twice as fast as in other
    arms. A margin is added to what is extrapolated: a tenth, and a quarter where freed memory is
    kept, because of fragmentation.
    """
    margin = _KEPT_MEMORY_MARGIN_SHARE if point.get(KEEP_MEMORY) else _MEMORY_MARGIN_SHARE
    batch = float(point[BATCH])
    arm = _memory_arm(point)
    own = _arms([item for item in measured if _memory_arm(item.point) == arm])
    if own:
        bound = _extrapolate(batch, own[0], margin)
        slopes = [_slope(arm) for arm in _arms(measured) if arm[0][0] < arm[-1][0]]
        largest, peak = own[0][-1]
        if len(own[0]) == 1 and slopes and batch > largest:
            # Most of one point may be what every process takes; others tell how memory grows.
            grown = peak + _MEMORY_GROWTH_FACTOR * max(slopes) * (batch - largest)
            return min(bound, grown * (1 + margin))
        return bound
    return max((_extrapolate(batch, arm, margin) for arm in _arms(measured)), default=None)


def _slope(arm: Sequence[tuple[float, int]]) -> float:
    """Return the bytes of each further sample."""
    (low, low_bytes), (high, high_bytes) = arm[0], arm[-1]
    return max(0.0, (high_bytes - low_bytes) / (high - low))


def _memory_arm(point: Point) -> tuple[KnobValue, ...]:
    gathered = point.get("reshard_after_forward", True)
    return (point["policy"], point["compile"], point.get(KEEP_MEMORY, False), gathered)


def _arms(measured: Sequence[MeasuredMemory]) -> list[list[tuple[float, int]]]:
    """Return the (batch, bytes) of every arm, by batch."""
    arms: dict[tuple[KnobValue, ...], list[tuple[float, int]]] = {}
    for item in measured:
        known = arms.setdefault(_memory_arm(item.point), [])
        known.append((float(item.point[BATCH]), item.peak_bytes))
    return [sorted(known) for known in arms.values()]


def _extrapolate(batch: float, known: Sequence[tuple[float, int]], margin: float) -> float:
    above = [item for item in known if item[0] >= batch]
    if above:
        nearest = min(size for size, _ in above)
        return float(max(peak for size, peak in above if size == nearest))
    (low, low_bytes), (high, high_bytes) = known[0], known[-1]
    if low == high:
        return high_bytes * batch / high * (1 + margin)
    slope = max(0.0, (high_bytes - low_bytes) / (high - low))
    return (high_bytes + slope * (batch - high)) * (1 + margin)
