"""Decides whether a precision trains like float32, from traces alone.

Three tests, from cheap to dear: the gate (does it run, stay finite, keep its steps), the shadow
(the same weights, batch and random numbers give the same loss and gradient), and the trajectory
(training from the same start stays together). Each is calibrated by a null: the same comparison
between float32 and float32 with slightly noisy weights, so that a task that is sensitive by
nature is not blamed on the precision. Nothing here trains, measures or looks at a clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autoprec.core.numerics.late_breaks import (
    error_floor,
    gradient_overflow,
    grows,
    late_gate,
    leans,
    long_run,
    wants_another_run,
    wants_more_steps,
)
from autoprec.core.numerics.loss_curves import MIN_STEPS, SeedRun, gate, metric, trajectory
from autoprec.core.numerics.records import NoisePoint, ShadowPoint, Trajectory
from autoprec.core.numerics.single_step import (
    NOISE_ROUNDOFF,
    delicate,
    headroom,
    shadow,
    wants_later_look,
)
from autoprec.core.numerics.tolerance import Check, Tolerance, mean, number, percent

__all__ = [
    "AT_THE_SAME_WEIGHTS",
    "LONG_LOOK",
    "LONG_STEPS",
    "MIN_STEPS",
    "Evidence",
    "SeedRun",
    "Tolerance",
    "Verdict",
    "asks_for_more",
    "calibrated_shadow",
    "gate",
    "grows",
    "headroom",
    "judge",
    "leans",
    "long_run",
    "metric",
    "shadow",
    "stays_close",
    "trajectory",
    "wants_another_run",
    "wants_later_look",
    "wants_more_steps",
]


LONG_STEPS = 60
"""Steps of the run that decides where losses are off in both directions at the same weights."""

AT_THE_SAME_WEIGHTS = "loss and gradient at the same weights"
"""What the shadow test compares, for people."""

LONG_LOOK = ("long", "excused")
"""The doubts that such a run settles."""

LONG_ENOUGH, LATE = 0.8, 1.6
"""The share of `LONG_STEPS` that still decides, and how many times `Tolerance.trajectory` its steps
may deviate in its second half: rounding that costs shows there before it shows in the mean."""

AGREES = 0.005
"""Trainings that stay so close, at their end and step by step, speak for single checkpoints that
are a little off."""

WITHIN_NOISE = 1.5
"""How many times as far as noise of its own size a run may leave float32 to speak for a shadow."""


@dataclass(frozen=True)
class Verdict:
    """A candidate judged against float32, with the numbers it rests on.

    "equal": trains like float32. "drift": trains, but not like float32. "rejected": does not.
    "equal at single steps": nothing was trained, so no more can be said. "unproven": the machine
    stalled.
    `loss_deviation` and `gradient_error` are the largest relative ones of the shadow test,
    `loss_null` and `gradient_null` what noise does there; `trajectory_deviation` is that of the
    mean loss of the last fifth, `trajectory_ratio` the deviation over the whole run against the
    noisy one's.
    `steps` is how far training was followed, from `first_loss` to `last_loss` in float32, and
    `most_steps` how far it might have been: what makes a repeated proof the same.
    A number that was not finite or not measured is None.
    """

    verdict: Literal["equal", "drift", "rejected", "equal at single steps", "unproven"]
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
    most_steps: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    seconds: float = 0.0
    covered: tuple[str, ...] = ()
    not_covered: tuple[str, ...] = ()

    @property
    def accepted(self) -> bool:
        """Whether the candidate trains like float32 as far as was tested."""
        return self.verdict == "equal"


@dataclass(frozen=True)
class Evidence:
    """All that was recorded of one candidate; `roundoff` is that of the format it computes in.

    `later` are checkpoints after those of the shadow test, looked at for the head-room only. `far`
    are those of a long float32 run after its first steps, with `far_noise`; and
    `late` the runs that go as far. `start` names the weights that training began with, where they
    were trained already. `onward` is the candidate's own run, which may go further
    than float32 was followed. `most` steps might have been made. `cut` says that the machine
    stalled before the proof was done.
    """

    shadow: tuple[ShadowPoint, ...] = ()
    later: tuple[ShadowPoint, ...] = ()
    noise: tuple[NoisePoint, ...] = ()
    runs: tuple[SeedRun, ...] = ()
    far: tuple[ShadowPoint, ...] = ()
    far_noise: tuple[NoisePoint, ...] = ()
    late: tuple[SeedRun, ...] = ()
    most: int = 0
    start: str = ""
    onward: Trajectory | None = None
    cut: bool = False
    seconds: float = 0.0
    not_covered: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    roundoff: float = NOISE_ROUNDOFF


def judge(evidence: Evidence, tolerance: Tolerance) -> Verdict:
    """Combine the tests: a failed gate, trajectory or metric rejects; the others are drift."""
    runs = evidence.runs
    float32 = gate((run.reference for run in runs), replace(tolerance, skipped=2**31))
    gated = _gate_shadow((*evidence.shadow, *evidence.far))
    if gated.passed:
        gated = gate((run.candidate for run in runs), tolerance)
    if delicate(evidence.noise, tolerance):
        runs = tuple(replace(run, noisy=None) for run in runs)
    shadowed = calibrated_shadow(evidence.shadow, evidence.noise, tolerance, evidence.roundoff)
    driven = trajectory(runs, tolerance)
    measured = metric((*evidence.late, *runs), tolerance)
    lasting = long_run(evidence.late, tolerance)
    followed = _followed(evidence)
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
        steps=max((len(run.candidate.losses) for run in (*runs, *evidence.late)), default=0),
        most_steps=evidence.most,
        first_loss=followed[0],
        last_loss=followed[1],
        seconds=evidence.seconds,
        covered=_covered(evidence, driven, measured),
        not_covered=evidence.not_covered,
    )
    if not float32.passed:
        return replace(numbers, verdict="rejected", reason=f"in float32 itself {float32.problem}")
    if evidence.cut and gated.passed:
        return _stalled(numbers, evidence, shadowed)
    early = max((len(run.candidate.losses) for run in runs), default=0)
    unknown = shadowed.doubt in LONG_LOOK and not any(run.noisy for run in runs)
    for check in (gated, measured) if unknown else (gated, driven, measured):
        if not check.passed:
            return replace(numbers, verdict="rejected", reason=check.problem, step=check.step)
    for check in (shadowed, headroom(evidence.shadow, evidence.later)):
        known = (early, tolerance, evidence.roundoff)
        if not check.passed and not _only_noise(check, driven, *known):
            reason = f"it trains, but not like float32: {check.problem}"
            if check.doubt and driven.judged:
                reason += f"; {_apart(driven, early)}"
            return replace(numbers, verdict="drift", reason=reason, step=check.step)
    if shadowed.doubt == "excused" and _leaves(driven, early, tolerance):
        reason = (
            f"it trains, but not like float32: its loss is {percent(shadowed.deviation or 0.0)} "
            "away at the same weights, as small noise would have it, but noise is trained away; "
            f"{_apart(driven, early)}"
        )
        return replace(numbers, verdict="drift", reason=reason, step=early)
    if not driven.judged:
        return _untrained(numbers, evidence)
    return _further_on(numbers, evidence, lasting, tolerance)


def _further_on(
    numbers: Verdict, evidence: Evidence, lasting: Check, tolerance: Tolerance
) -> Verdict:
    """Judge what came after the first steps, of what had passed until then."""
    for check in (late_gate(evidence.onward, tolerance), lasting):
        if not check.passed:
            return replace(numbers, verdict="rejected", reason=check.problem, step=check.step)
    growing = gradient_overflow((*evidence.shadow, *evidence.far))
    for check in (growing, _floor(evidence, tolerance)):
        if not check.passed:
            reason = f"it trains, but not like float32: {check.problem}"
            return replace(numbers, verdict="drift", reason=reason, step=check.step)
    return replace(numbers, reason=_praise(numbers, lasting, evidence.start))


def calibrated_shadow(
    points: Sequence[ShadowPoint],
    noise: Sequence[NoisePoint],
    tolerance: Tolerance,
    roundoff: float,
) -> Check:
    """Test the shadow, with noise as an excuse only where float32 itself bears it.

    Where it does not, noise cannot speak for what is near either, but a long run can.
    """
    if not delicate(noise, tolerance):
        return shadow(points, noise, tolerance, roundoff)
    alone = shadow(points, (), tolerance, roundoff)
    gradients = (alone.gradient_error or 0.0) > tolerance.gradient
    return replace(alone, doubt="long") if alone.doubt == "near" and gradients else alone


def asks_for_more(evidence: Evidence, tolerance: Tolerance) -> bool:
    """Whether what passed at the same weights is worth the longest run that the proof may take.

    That is where training had to settle what the shadow test left in doubt, and where the loss
    leaves float32's from mark to mark (`leans`).
    """
    shadowed = calibrated_shadow(evidence.shadow, evidence.noise, tolerance, evidence.roundoff)
    return bool(shadowed.doubt) or leans((*evidence.shadow, *evidence.far), tolerance)


def stays_close(run: SeedRun, tolerance: Tolerance) -> bool:
    """Whether one seed's training is so close to float32's that another seed would say the same."""
    return _agrees(trajectory((run,), tolerance))


def _agrees(driven: Check) -> bool:
    """Whether trainings stay together, at their end and step by step in their second half."""
    return number(driven.deviation) <= AGREES and number(driven.late) <= AGREES


def _only_noise(
    shadowed: Check, driven: Check, steps: int, tolerance: Tolerance, roundoff: float
) -> bool:
    """Whether the trajectories settle the doubt that a failed shadow test left.

    Where gradients are right, trainings that stay together step by step (`AGREES`) speak for what
    is nearly right. Losses that are off in both directions must stay together over `LONG_STEPS`; a
    broken precision that shows in nothing else leaves float32 by then. Else, what is nearly right
    must keep training as close to float32 as noise of the format's own size does.
    """
    if not shadowed.doubt or driven.deviation is None or driven.ratio is None:
        return False
    if shadowed.doubt == "long" and steps >= LONG_ENOUGH * LONG_STEPS:
        return not _leaves(driven, steps, tolerance)
    right = number(shadowed.gradient_error) <= tolerance.gradient
    if right and _agrees(driven):
        return True
    return driven.ratio <= WITHIN_NOISE * roundoff / NOISE_ROUNDOFF


def _apart(driven: Check, steps: int) -> str:
    """How far training ended from float32, as people read it."""
    ended, late = percent(number(driven.deviation)), percent(number(driven.late))
    return f"after {steps} steps it is {ended} away, and single steps by then {late}"


def _leaves(driven: Check, steps: int, tolerance: Tolerance) -> bool:
    """Whether a long run leaves float32, at its end or step by step in its second half."""
    ends = number(driven.deviation) > tolerance.trajectory
    leaves = ends or number(driven.late) > LATE * tolerance.trajectory
    return steps >= LONG_ENOUGH * LONG_STEPS and leaves


def _gate_shadow(points: Sequence[ShadowPoint]) -> Check:
    for point in points:
        if point.loss is None or not math.isfinite(point.loss):
            problem = f"the loss is not finite at the weights and batch of step {point.step}"
            return Check(problem=problem, step=point.step)
    return Check()


def _covered(evidence: Evidence, driven: Check, measured: Check) -> tuple[str, ...]:
    covered = []
    if evidence.shadow:
        seen = {point.step for point in (*evidence.shadow, *evidence.far, *evidence.later)}
        covered.append(f"{AT_THE_SAME_WEIGHTS} at steps {', '.join(map(str, sorted(seen)))}")
    if driven.judged:
        seeds = [run.candidate.seed for run in evidence.late]
        rest = [run for run in evidence.runs if run.candidate.seed not in seeds]
        lengths = ", ".join(str(len(run.candidate.losses)) for run in (*evidence.late, *rest))
        covered.append(f"trainings of {lengths} steps")
    if measured.judged:
        covered.append("evaluate(model)")
    return (*covered, *evidence.notes)


def _floor(evidence: Evidence, tolerance: Tolerance) -> Check:
    """The error floor that all marks of the float32 run foretell."""
    longest = max((*evidence.late, *evidence.runs), key=lambda run: len(run.reference.losses))
    points, noise = (*evidence.shadow, *evidence.far), (*evidence.noise, *evidence.far_noise)
    return error_floor(points, noise, longest, tolerance)


def _stalled(numbers: Verdict, evidence: Evidence, shadowed: Check) -> Verdict:
    """What can be said where the machine stalled: nothing of training."""
    if evidence.shadow and shadowed.passed:
        return _untrained(numbers, evidence)
    reason = f"not covered: {'; '.join(evidence.not_covered)}; repeat it, or give it fewer {FEWER}"
    return replace(numbers, verdict="unproven", reason=reason)


FEWER = "steps (--proof-steps)"


def _untrained(numbers: Verdict, evidence: Evidence) -> Verdict:
    """Say that single steps are equal, where there are any, and that nothing was trained."""
    if not evidence.shadow:
        reason = f"nothing could be compared with float32; give the proof more {FEWER}"
        return replace(numbers, verdict="unproven", reason=reason)
    reason = f"equal at single steps, but nothing was trained: {_at_single_steps(numbers)}"
    return replace(numbers, verdict="equal at single steps", reason=reason)


def _followed(evidence: Evidence) -> tuple[float | None, float | None]:
    """Where float32's loss began and ended, over the longest run that was judged."""
    runs = [run.reference for run in (*evidence.late, *evidence.runs)]
    losses = max((run.losses for run in runs), key=len, default=())
    if not losses or None in losses:
        return None, None
    tail = [loss for loss in losses[-max(1, len(losses) // 5) :] if loss is not None]
    return losses[0], mean(tail)


def _at_single_steps(numbers: Verdict) -> str:
    if numbers.loss_deviation is None:
        return ""
    return f"loss within {percent(numbers.loss_deviation)} at the same weights"


def _praise(numbers: Verdict, lasting: Check, start: str) -> str:
    """What passed and over which part of training."""
    ended = lasting.deviation if lasting.judged else numbers.trajectory_deviation
    parts = [
        _at_single_steps(numbers),
        f"within {percent(number(ended))} after {numbers.steps} steps",
    ]
    first, last = number(numbers.first_loss), number(numbers.last_loss)
    over = f"{numbers.steps} steps from {start}" if start else f"the first {numbers.steps} steps"
    told = (
        f"trains like float32: equal over {over}, loss {first:.2g} to {last:.2g}; "
        f"{', '.join(part for part in parts if part)}"
    )
    if numbers.not_covered:
        told += f" (not covered: {'; '.join(numbers.not_covered)})"
    return told
