"""Decides whether a precision trains like float32, from traces alone.

Three tests, from cheap to dear: the gate (does it run, stay finite, keep its steps), the shadow
(the same weights, batch and random numbers give the same loss and gradient), and the trajectory
(training from the same start stays together). Each is calibrated by a null: the same comparison
between float32 and float32 with slightly noisy weights, so that a task that is sensitive by
nature is not blamed on the precision. Nothing here trains, measures or looks at a clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autoprec.core.dtypes import DType
from autoprec.core.trace import NoisePoint, ShadowPoint, Trajectory
from autoprec.errors import UsageError

FLIPS = 3 / 8
"""The share of the noise that the finest format is excused: a choice that flips (a router's, an
argmax's) flips more seldom in it, but changes no less when it does."""

HORIZON = 10
"""Numbers that grow are looked ahead for this many times the steps that were seen."""

NOISE_ROUNDOFF = DType.BFLOAT16.limits.unit_roundoff
"""The format whose rounding the null's noise stands for."""

MIN_STEPS = 5
"""A trajectory shorter than this is not judged: its last fifth would be less than one step."""

LOSS_FLOOR = 1e-2
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
    trajectory_null: float = 3.0
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


@dataclass(frozen=True)
class SeedRun:
    """One seed's runs: float32, the candidate, and float32 with noisy weights (None: not run)."""

    reference: Trajectory
    candidate: Trajectory
    noisy: Trajectory | None = None


@dataclass(frozen=True)
class Check:
    """The outcome of one test: empty `problem` means passed; `judged` False, too little to tell.

    `noise` and `gradient_noise` are what noise does to `deviation` and `gradient_error`; `value`
    and `reference` are the user's metric.
    """

    judged: bool = True
    problem: str = ""
    step: int | None = None
    deviation: float | None = None
    gradient_error: float | None = None
    noise: float | None = None
    gradient_noise: float | None = None
    ratio: float | None = None
    value: float | None = None
    reference: float | None = None
    skipped: int = 0

    @property
    def passed(self) -> bool:
        """Whether nothing was found wrong."""
        return not self.problem


@dataclass(frozen=True)
class Verdict:
    """A candidate judged against float32, with the numbers it rests on.

    "equal": trains like float32. "drift": trains, but not like float32. "rejected": does not.
    `loss_deviation` and `gradient_error` are the largest relative ones of the shadow test,
    `loss_null` and `gradient_null` what noise does there; `trajectory_deviation` is that of the
    mean loss of the last fifth, `trajectory_ratio` the deviation over the whole run against the
    noisy one's.
    A number that was not finite or not measured is None.
    """

    verdict: Literal["equal", "drift", "rejected"]
    reason: str
    step: int | None = None
    loss_deviation: float | None = None
    gradient_error: float | None = None
    loss_null: float | None = None
    gradient_null: float | None = None
    trajectory_deviation: float | None = None
    trajectory_ratio: float | None = None
    metric: float | None = None
    metric_reference: float | None = None
    skipped_steps: int = 0
    steps: int = 0
    seconds: float = 0.0
    covered: tuple[str, ...] = ()
    not_covered: tuple[str, ...] = ()

    @property
    def accepted(self) -> bool:
        """Whether the candidate trains like float32 as far as was tested."""
        return self.verdict == "equal"


def gate(runs: Iterable[Trajectory], tolerance: Tolerance) -> Check:
    """Check that every loss is finite and that no run throws away more steps than allowed."""
    skipped = 0
    for run in runs:
        skipped += len(run.skipped)
        for step, loss in enumerate(run.losses):
            if loss is None or not math.isfinite(loss):
                return Check(problem=f"the loss is not finite at step {step}", step=step)
        if len(run.skipped) > tolerance.skipped:
            return Check(
                problem=(
                    f"{len(run.skipped)} of {len(run.losses)} steps were skipped because "
                    "gradients overflowed"
                ),
                step=run.skipped[0],
                skipped=skipped,
            )
    return Check(skipped=skipped)


def shadow(
    points: Sequence[ShadowPoint],
    noise: Sequence[NoisePoint],
    tolerance: Tolerance,
    roundoff: float = NOISE_ROUNDOFF,
) -> Check:
    """Check loss and gradient at the same weights, batch and random numbers.

    The loss may deviate by `tolerance.loss` or `tolerance.loss_null` times the null, the gradient
    by `tolerance.gradient` or what noise allows it, whichever is larger. The noise is bfloat16's;
    a format with a smaller `roundoff` answers for less of it, but not for less than `FLIPS`. One of
    three or more checkpoints that fails where the last does not was passed through: the
    trajectories judge it.
    """
    if not points:
        return Check(judged=False)
    finer = min(1.0, max(FLIPS, roundoff / NOISE_ROUNDOFF))
    scale = LOSS_FLOOR * abs(points[0].reference)
    null = finer * max((_deviation(p.loss, p.reference, scale) for p in noise), default=0.0)
    errors_of_noise = [(p.step, finer * (p.gradient_error or 0.0)) for p in noise]
    gradient_null = max((error for _, error in errors_of_noise), default=0.0)
    deviations = [_deviation(p.loss, p.reference, scale) for p in points]
    errors = [_number(p.gradient_error) for p in points]
    numbers = Check(
        deviation=_finite(max(deviations)),
        gradient_error=_finite(max(errors)),
        noise=_finite(null),
        gradient_noise=_finite(gradient_null),
    )
    loss_limit = max(tolerance.loss, tolerance.loss_null * null)
    failed: list[Check] = []
    for point, deviation, error in zip(points, deviations, errors, strict=True):
        gradient_limit = _gradient_limit(point.step, errors_of_noise, tolerance)
        away, limit, what = deviation, loss_limit, "loss"
        if deviation <= loss_limit:
            away, limit, what = error, gradient_limit, "gradient"
        if away > limit:
            problem = (
                f"at the same weights and batch of step {point.step} its {what} is "
                f"{_percent(away)} away from float32's; {_percent(limit)} is allowed"
            )
            failed.append(replace(numbers, problem=problem, step=point.step))
    passing = len(failed) == 1 < len(points) - 1 and failed[0].step != points[-1].step
    return failed[0] if failed and not passing else numbers


def delicate(noise: Sequence[NoisePoint], tolerance: Tolerance) -> bool:
    """Whether float32 itself does not bear noise of bfloat16's size, so that it excuses nothing.

    Chaos and convergence leave the gradient well defined at the earlier checkpoints. Where noise
    moves it by more than is allowed at most of them, the noise does what a broken precision does:
    as with a weight that multiplies positions far beyond 256.
    """
    largest: dict[int, float] = {}
    for point in noise:
        largest[point.step] = max(largest.get(point.step, 0.0), point.gradient_error or 0.0)
    errors = sorted(largest.values())
    return bool(errors) and errors[(len(errors) - 1) // 2] > tolerance.gradient


def _gradient_limit(step: int, noise: Sequence[tuple[int, float]], tolerance: Tolerance) -> float:
    """How far the gradient of a step may be away, relative to float32's.

    Noise elsewhere in the run never excuses a gradient that is lost: one that is all zero is away
    by exactly 1. Noise at the step itself may, where hardly any gradient is left to compare with.
    """
    here = max((error for other, error in noise if other == step), default=0.0)
    lost = min(0.9, tolerance.gradient_null * max((error for _, error in noise), default=0.0))
    return max(tolerance.gradient, lost, tolerance.gradient_null * here)


def headroom(points: Sequence[ShadowPoint]) -> Check:
    """Check that float16 numbers of the forward pass do not grow out of float16's range.

    Where their largest magnitude grew over the last three checkpoints, it is continued as the
    square of something that grows evenly, as weights under Adam do and squared activations with
    them. If it passes 2**16 within `HORIZON` times the steps seen, or has done so already, an
    overflow is to be expected, although the loss may not show it yet. What is large, or infinite
    as masks are, from the start is left to the other tests.
    """
    seen = [(p.step, _magnitude(p)) for p in points if p.step > 0 and _magnitude(p) > 0]
    if len(seen) < 3:
        return Check(judged=False)
    (_, least), (before, less), (step, more) = seen[-3:]
    if not least < less < more:
        return Check()
    grew = f"the largest float16 number of its forward pass grew from {less:.3g} at step {before}"
    if math.isinf(more):
        return Check(problem=f"{grew} to infinity at step {step}", step=step)
    pace = (math.sqrt(more) - math.sqrt(less)) / (step - before)
    limit = 2.0 ** (DType.FLOAT16.limits.max_exponent + 1)
    when = step + (math.sqrt(limit) - math.sqrt(more)) / pace
    if when > HORIZON * (step + 1):
        return Check()
    problem = f"{grew} to {more:.3g} at step {step}; so it overflows by step {when:.0f}"
    return Check(problem=problem, step=step)


def _magnitude(point: ShadowPoint) -> float:
    return math.inf if point.overflowed else point.largest or 0.0


def trajectory(runs: Sequence[SeedRun], tolerance: Tolerance) -> Check:
    """Check that training from the same start stays with float32.

    It fails where the mean loss of the last fifth deviates by more than `tolerance.trajectory` and
    the root mean square deviation of the whole run is more than `tolerance.trajectory_null` times
    that of noisy float32 (plus `tolerance.trajectory_slack` of the first loss).
    """
    judged = [pair for pair in (_aligned(run) for run in runs) if pair is not None]
    if not judged:
        return Check(judged=False)
    deviation = _mean(_tail_deviation(pair) for pair in judged)
    distance = _root_mean_square(_relative_distance(p.candidate, p.reference) for p in judged)
    nulls = [_relative_distance(p.noisy, p.reference) for p in judged if p.noisy]
    null = _root_mean_square(nulls)
    ratio = distance / (null + tolerance.trajectory_slack)
    numbers = Check(deviation=_finite(deviation), ratio=_finite(ratio), noise=_finite(null))
    if deviation <= tolerance.trajectory or ratio <= tolerance.trajectory_null:
        return numbers
    steps = min(len(pair.reference) for pair in judged)
    problem = (
        f"after {steps} steps its loss is {_percent(deviation)} away from float32's, "
        f"{ratio:.3g} times as far as small noise drives float32"
    )
    return replace(numbers, problem=problem, step=_parting(judged, null, tolerance))


def metric(runs: Sequence[SeedRun], tolerance: Tolerance) -> Check:
    """Check the user's own metric (higher is better) after an equal number of steps, over seeds."""
    pairs = [
        (run.reference.metric, run.candidate.metric, run.noisy.metric if run.noisy else None)
        for run in runs
        if len(run.reference.losses) == len(run.candidate.losses)
    ]
    known = [(r, c, n) for r, c, n in pairs if r is not None and c is not None]
    if not known:
        return Check(judged=False)
    reference = _mean(r for r, _, _ in known)
    candidate = _mean(c for _, c, _ in known)
    null = max((abs(n - r) for r, _, n in known if n is not None), default=0.0)
    numbers = Check(value=_finite(candidate), reference=_finite(reference), noise=_finite(null))
    drop = reference - candidate
    if drop <= max(tolerance.metric * abs(reference), tolerance.metric_null * null):
        return numbers
    problem = f"evaluate(model) gives {candidate:.4g} where float32 reaches {reference:.4g}"
    return replace(numbers, problem=problem, step=len(runs[0].candidate.losses))


@dataclass(frozen=True)
class Evidence:
    """All that was recorded of one candidate; `roundoff` is that of the format it computes in."""

    shadow: tuple[ShadowPoint, ...] = ()
    noise: tuple[NoisePoint, ...] = ()
    runs: tuple[SeedRun, ...] = ()
    seconds: float = 0.0
    not_covered: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    roundoff: float = NOISE_ROUNDOFF


def judge(evidence: Evidence, tolerance: Tolerance) -> Verdict:
    """Combine the tests: a failed gate, trajectory or metric rejects; the others are drift."""
    runs = evidence.runs
    float32 = gate((run.reference for run in runs), replace(tolerance, skipped=2**31))
    gated = _gate_shadow(evidence.shadow)
    if gated.passed:
        gated = gate((run.candidate for run in runs), tolerance)
    if delicate(evidence.noise, tolerance):
        evidence = replace(evidence, noise=())
        runs = tuple(replace(run, noisy=None) for run in runs)
    shadowed = shadow(evidence.shadow, evidence.noise, tolerance, evidence.roundoff)
    driven = trajectory(runs, tolerance)
    measured = metric(runs, tolerance)
    numbers = Verdict(
        verdict="equal",
        reason="",
        loss_deviation=shadowed.deviation,
        gradient_error=shadowed.gradient_error,
        loss_null=shadowed.noise,
        gradient_null=shadowed.gradient_noise,
        trajectory_deviation=driven.deviation,
        trajectory_ratio=driven.ratio,
        metric=measured.value,
        metric_reference=measured.reference,
        skipped_steps=sum(len(run.candidate.skipped) for run in runs),
        steps=max((len(run.candidate.losses) for run in runs), default=0),
        seconds=evidence.seconds,
        covered=_covered(evidence, driven, measured),
        not_covered=evidence.not_covered,
    )
    if not evidence.shadow and not driven.judged and float32.passed and gated.passed:
        reason = (
            "nothing could be compared with float32 in the time allowed; give the proof more "
            "(--proof-seconds)"
        )
        return replace(numbers, verdict="rejected", reason=reason)
    if not float32.passed:
        return replace(numbers, verdict="rejected", reason=f"in float32 itself {float32.problem}")
    for check in (gated, driven, measured):
        if not check.passed:
            return replace(numbers, verdict="rejected", reason=check.problem, step=check.step)
    for check in (shadowed, headroom(evidence.shadow)):
        if not check.passed:
            reason = f"it trains, but not like float32: {check.problem}"
            return replace(numbers, verdict="drift", reason=reason, step=check.step)
    return replace(numbers, reason=_praise(numbers))


def _gate_shadow(points: Sequence[ShadowPoint]) -> Check:
    for point in points:
        if point.loss is None or not math.isfinite(point.loss):
            problem = f"the loss is not finite at the weights and batch of step {point.step}"
            return Check(problem=problem, step=point.step)
    return Check()


def _covered(evidence: Evidence, driven: Check, measured: Check) -> tuple[str, ...]:
    covered = []
    if evidence.shadow:
        steps = ", ".join(str(point.step) for point in evidence.shadow)
        covered.append(f"shadow at steps {steps}")
    if driven.judged:
        lengths = ", ".join(str(len(run.candidate.losses)) for run in evidence.runs)
        covered.append(f"trajectories of {lengths} steps")
    if measured.judged:
        covered.append("evaluate(model)")
    return (*covered, *evidence.notes)


def _praise(numbers: Verdict) -> str:
    parts = []
    if numbers.loss_deviation is not None:
        parts.append(f"loss within {_percent(numbers.loss_deviation)} at the same weights")
    if numbers.trajectory_deviation is not None:
        parts.append(f"within {_percent(numbers.trajectory_deviation)} after {numbers.steps} steps")
    return "trains like float32: " + (", ".join(parts) or "the loss stays finite")


@dataclass(frozen=True)
class _Aligned:
    """One seed's losses cut to the steps all runs have, relative to the first float32 loss."""

    reference: tuple[float, ...]
    candidate: tuple[float, ...]
    noisy: tuple[float, ...]


def _aligned(run: SeedRun) -> _Aligned | None:
    rows = [run.reference, run.candidate] + ([run.noisy] if run.noisy else [])
    steps = min(len(row.losses) for row in rows)
    if steps < MIN_STEPS:
        return None
    losses = [tuple(math.inf if x is None else x for x in row.losses[:steps]) for row in rows]
    return _Aligned(losses[0], losses[1], losses[2] if run.noisy else ())


def _tail_deviation(pair: _Aligned) -> float:
    tail = max(1, len(pair.reference) // 5)
    reference, candidate = _mean(pair.reference[-tail:]), _mean(pair.candidate[-tail:])
    return _deviation(candidate, reference, LOSS_FLOOR * abs(pair.reference[0]))


def _relative_distance(losses: Sequence[float], reference: Sequence[float]) -> float:
    first = abs(reference[0]) or 1.0
    return _root_mean_square((a - b) / first for a, b in zip(losses, reference, strict=True))


def _parting(pairs: Sequence[_Aligned], null: float, tolerance: Tolerance) -> int:
    """The first step from which a run is further away than allowed."""
    for step in range(min(len(pair.reference) for pair in pairs)):
        for pair in pairs:
            first = abs(pair.reference[0]) or 1.0
            distance = abs(pair.candidate[step] - pair.reference[step]) / first
            if distance > tolerance.trajectory_null * (null + tolerance.trajectory_slack):
                return step
    return 0


def _deviation(loss: float | None, reference: float, floor: float) -> float:
    difference = abs(_number(loss) - reference)
    if difference == 0.0:
        return 0.0
    return difference / max(abs(reference), floor, 1e-30)


def _number(value: float | None) -> float:
    return math.inf if value is None or math.isnan(value) else value


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _mean(values: Iterable[float]) -> float:
    items = list(values)
    return sum(items) / len(items)


def _root_mean_square(values: Iterable[float]) -> float:
    items = [value * value for value in values]
    return math.sqrt(sum(items) / len(items)) if items else 0.0


def _percent(value: float) -> str:
    return f"{100 * value:.2g} %" if math.isfinite(value) else "infinitely far"
