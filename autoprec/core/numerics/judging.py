"""Decides whether a precision trains like float32, from traces alone.

Three tests, from cheap to expensive: stability (it runs, stays finite, skips few steps), single
steps (the same weights, batch and random numbers give the same loss and gradient), and loss curves
(trainings from the same start stay together). Longer runs follow what passes (`late_failures`).
Each is calibrated by a null: the same comparison between float32 and float32 with slightly noisy
weights, so that a task that is sensitive by nature is not blamed on the precision. Nothing here
trains, measures or looks at a clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from autoprec.core.number_words import percent
from autoprec.core.numerics.buffers import BufferCheck, check_buffers
from autoprec.core.numerics.headroom import check_headroom
from autoprec.core.numerics.late_failures import (
    check_error_floor,
    check_gradient_growth,
    check_long_run_stability,
    check_long_runs,
    deviation_grows,
)
from autoprec.core.numerics.learning import has_learned
from autoprec.core.numerics.loss_curves import (
    SeedRun,
    check_metric,
    check_stability,
    check_trajectory,
)
from autoprec.core.numerics.loss_origin import above_origin
from autoprec.core.numerics.single_step import (
    NOISE_ROUNDOFF,
    check_evaluation,
    check_other_batches,
    check_single_steps,
    is_noise_sensitive,
)
from autoprec.core.numerics.tolerance import Check, Tolerance, or_infinity
from autoprec.core.numerics.traces import NoisyStep, StepComparison
from autoprec.core.numerics.verdict import (
    NOTHING_LEARNED,
    NOTHING_TO_COMPARE,
    ProofEvidence,
    Verdict,
    describe_end,
    describe_ended,
    describe_shares,
    describe_success,
    describe_untrained,
    longest_losses,
    loss_range,
)

LONG_STEPS = 60
"""Steps of the run that decides when losses at the same weights deviate in both directions."""

AT_THE_SAME_WEIGHTS = "loss and gradient at the same weights"
"""What the single-step test compares, in words for people."""

DECIDED_BY_LONG_RUN = ("both_signs", "noise_level")
"""The values of `Check.undecided` that a run of `LONG_STEPS` decides."""

LONG_STEPS_SHARE, SECOND_HALF_FACTOR = 0.8, 1.6
"""The share of `LONG_STEPS` that still decides, and how many times `Tolerance.trajectory` single
steps may deviate in its second half: harmful rounding shows there before it shows in the mean."""

CLOSE_DEVIATION = 0.005
"""Trainings this close to float32, at their end and at single steps, clear checkpoints that
deviate slightly."""

OWN_NOISE_FACTOR = 1.5
"""How many times as far as noise of its format's size a run may deviate and still clear single
steps."""


@dataclass(frozen=True)
class _Checks:
    """The outcomes of all tests of one candidate."""

    stability: Check
    single: Check
    buffers: BufferCheck
    evaluation: Check
    others: Check
    curves: Check
    metric: Check
    long: Check


def judge(evidence: ProofEvidence, tolerance: Tolerance) -> Verdict:
    """Combine the tests: failed stability, trajectory or metric rejects; the others are drift.

    A share of a loss is one of what is above its origin; see `loss_origin`.
    """
    evidence = above_origin(evidence)
    runs = evidence.runs
    float32 = check_stability((run.reference for run in runs), replace(tolerance, skipped=2**31))
    if is_noise_sensitive(evidence.noise, tolerance):
        runs = tuple(replace(run, noisy=None) for run in runs)
    checks = _run_checks(evidence, runs, tolerance)
    numbers = _numbers(evidence, runs, checks)
    if not float32.passed:
        return replace(numbers, verdict="rejected", reason=f"in float32 itself {float32.problem}")
    if checks.stability.passed and evidence.is_zero:
        return replace(numbers, verdict="unproven", reason=NOTHING_TO_COMPARE)
    ended = evidence.ended_by and not _tells_enough(evidence, checks.curves, tolerance)
    if ended and checks.stability.passed:
        return _judge_untrained(numbers, evidence, checks.single)
    failed = _judge_first_steps(numbers, evidence, runs, checks, tolerance)
    if failed is not None:
        return failed
    if not checks.curves.judged:
        return _judge_untrained(numbers, evidence, checks.single)
    return _judge_long_runs(numbers, evidence, checks, tolerance)


def _run_checks(evidence: ProofEvidence, runs: Sequence[SeedRun], tolerance: Tolerance) -> _Checks:
    stable = _check_losses_finite((*evidence.comparisons, *evidence.late_comparisons))
    if stable.passed:
        stable = check_stability((run.candidate for run in runs), tolerance)
    noise, roundoff = evidence.noise, evidence.roundoff
    return _Checks(
        stability=stable,
        single=check_calibrated(evidence.comparisons, noise, tolerance, roundoff),
        buffers=check_all_buffers(evidence, tolerance),
        evaluation=check_all_evaluations(evidence, tolerance),
        others=check_all_other_batches(evidence, tolerance),
        curves=check_trajectory(runs, tolerance),
        metric=check_metric((*evidence.long_runs, *runs), tolerance),
        long=check_long_runs(evidence.long_runs, tolerance),
    )


def _numbers(evidence: ProofEvidence, runs: Sequence[SeedRun], checks: _Checks) -> Verdict:
    """Return a verdict that holds the numbers, and nothing against the candidate."""
    losses = longest_losses(evidence)
    first_loss, last_loss = loss_range(losses)
    return Verdict(
        verdict="equal",
        reason="",
        loss_deviation=checks.single.deviation,
        gradient_error=checks.single.gradient_error,
        loss_null=checks.single.noise,
        gradient_null=checks.single.gradient_noise,
        trajectory_deviation=checks.curves.deviation,
        trajectory_ratio=checks.curves.ratio if any(run.noisy for run in runs) else None,
        metric=checks.metric.value,
        metric_reference=checks.metric.reference,
        skipped_steps=sum(len(run.candidate.skipped) for run in runs),
        steps=max((len(run.candidate.losses) for run in (*runs, *evidence.long_runs)), default=0),
        most_steps=evidence.max_steps,
        trained_batch=evidence.trained_batch,
        first_loss=first_loss,
        last_loss=last_loss,
        loss_origin=evidence.loss_origin,
        caveat="" if evidence.start or has_learned(losses) else NOTHING_LEARNED,
        seconds=evidence.seconds,
        covered=_covered(evidence, checks),
        buffers=checks.buffers.describe(),
        not_covered=evidence.not_covered,
    )


def _judge_first_steps(
    numbers: Verdict,
    evidence: ProofEvidence,
    runs: Sequence[SeedRun],
    checks: _Checks,
    tolerance: Tolerance,
) -> Verdict | None:
    """Judge the first steps; None if they have passed."""
    single, curves = checks.single, checks.curves
    steps = max((len(run.candidate.losses) for run in runs), default=0)
    uncalibrated = single.undecided in DECIDED_BY_LONG_RUN and not any(run.noisy for run in runs)
    rejecting = (checks.stability, *(() if uncalibrated else (curves,)), checks.metric)
    for check in rejecting:
        if not check.passed:
            return _because(numbers, "rejected", check)
    for check in (single, check_headroom(evidence.comparisons, evidence.headroom_comparisons)):
        if not check.passed and not training_clears(
            check, curves, steps, tolerance, evidence.roundoff
        ):
            if not (check.undecided and curves.judged):
                return _because(numbers, "drift", check)
            problem = f"{check.problem}; {describe_end(curves, steps)}"
            return _because(numbers, "drift", replace(check, problem=problem, of_loss=True))
    buffers = Check(problem=checks.buffers.problem, step=checks.buffers.step)
    for check in (buffers, checks.evaluation, checks.others):
        if not check.passed:
            return _because(numbers, "drift", check)
    if single.undecided == "noise_level" and _leaves_float32(curves, steps, tolerance):
        problem = (
            f"its loss is {percent(single.deviation or 0.0)} away at the same weights; small noise "
            f"does the same, but training averages noise out; {describe_end(curves, steps)}"
        )
        return _because(numbers, "drift", Check(problem=problem, of_loss=True, step=steps))
    return None


def _judge_long_runs(
    numbers: Verdict, evidence: ProofEvidence, checks: _Checks, tolerance: Tolerance
) -> Verdict:
    """Judge what happened after the first steps, if these have passed."""
    for check in (check_long_run_stability(evidence.candidate_run, tolerance), checks.long):
        if not check.passed:
            return _because(numbers, "rejected", check)
    growing = check_gradient_growth((*evidence.comparisons, *evidence.late_comparisons))
    for check in (growing, check_floor(evidence, tolerance)):
        if not check.passed:
            return _because(numbers, "drift", check)
    ended = checks.long if checks.long.judged else checks.curves
    said = describe_success(numbers, ended, evidence)
    return replace(numbers, reason=said + describe_shares(numbers))


def _because(numbers: Verdict, verdict: Literal["rejected", "drift"], check: Check) -> Verdict:
    """Return the verdict that follows from a check that did not pass."""
    told = "it trains, but not like float32: " if verdict == "drift" else ""
    shares = describe_shares(numbers, with_loss=True) if check.of_loss else ""
    reason = f"{told}{check.problem}{shares}"
    return replace(numbers, verdict=verdict, reason=reason, step=check.step)


def check_first_steps(evidence: ProofEvidence, tolerance: Tolerance) -> Check:
    """Check the single steps of the first checkpoints."""
    evidence = above_origin(evidence)
    return check_calibrated(evidence.comparisons, evidence.noise, tolerance, evidence.roundoff)


def check_all_buffers(evidence: ProofEvidence, tolerance: Tolerance) -> BufferCheck:
    """Check what steps leave in buffers, at all checkpoints."""
    points, noise = _all_checkpoints(evidence)
    return check_buffers(points, noise, tolerance, evidence.roundoff)


def check_all_evaluations(evidence: ProofEvidence, tolerance: Tolerance) -> Check:
    """Check what the model gives in evaluation, at all checkpoints that have it."""
    points, noise = _all_checkpoints(evidence)
    return check_evaluation(points, noise, tolerance, evidence.roundoff)


def check_all_other_batches(evidence: ProofEvidence, tolerance: Tolerance) -> Check:
    """Check the single steps on batches of other sizes."""
    evidence = above_origin(evidence)
    points, others, noise = evidence.comparisons, evidence.other_batches, evidence.other_noise
    return check_other_batches(points, others, noise, tolerance, evidence.roundoff)


def check_calibrated(
    points: Sequence[StepComparison],
    noise: Sequence[NoisyStep],
    tolerance: Tolerance,
    roundoff: float,
) -> Check:
    """Check single steps, allowing for noise only if float32 itself tolerates it.

    If it does not, noise cannot clear what is near the limit either, but a long run can.
    """
    if not is_noise_sensitive(noise, tolerance):
        return check_single_steps(points, noise, tolerance, roundoff)
    alone = check_single_steps(points, (), tolerance, roundoff)
    gradients = (alone.gradient_error or 0.0) > tolerance.gradient
    return (
        replace(alone, undecided="both_signs")
        if alone.undecided == "near_limit" and gradients
        else alone
    )


def needs_longest_run(evidence: ProofEvidence, tolerance: Tolerance) -> bool:
    """Return whether what passed at the same weights needs the longest run that a proof may take.

    It does if training had to decide what the single-step test left undecided, if the
    loss moves away from float32's between checkpoints (`deviation_grows`), and in a coarse format.
    """
    if evidence.coarse:
        return True
    evidence = above_origin(evidence)
    single = check_first_steps(evidence, tolerance)
    return bool(single.undecided) or deviation_grows(
        (*evidence.comparisons, *evidence.late_comparisons), tolerance
    )


def stays_close(run: SeedRun, tolerance: Tolerance) -> bool:
    """Return whether one seed's training is so close to float32's that no second one is needed."""
    return _is_close(check_trajectory((run,), tolerance))


def _is_close(curves: Check) -> bool:
    """Return whether trainings stay together, at the end and step by step in the second half."""
    return (
        or_infinity(curves.deviation) <= CLOSE_DEVIATION
        and or_infinity(curves.second_half) <= CLOSE_DEVIATION
    )


def training_clears(
    single: Check, curves: Check, steps: int, tolerance: Tolerance, roundoff: float
) -> bool:
    """Return whether the trajectories clear what the single-step test left undecided.

    If gradients are right, trainings that stay together step by step (`CLOSE_DEVIATION`) clear
    what is near the limit. Losses that deviate in both directions must stay together over
    `LONG_STEPS`; a broken precision that shows in nothing else leaves float32 by then. Otherwise,
    what is near the limit must train as close to float32 as noise of the format's own size does.
    """
    if not single.undecided or curves.deviation is None or curves.ratio is None:
        return False
    if single.undecided == "both_signs" and steps >= LONG_STEPS_SHARE * LONG_STEPS:
        return not _leaves_float32(curves, steps, tolerance)
    right = or_infinity(single.gradient_error) <= tolerance.gradient
    if right and _is_close(curves):
        return True
    return curves.ratio <= OWN_NOISE_FACTOR * roundoff / NOISE_ROUNDOFF


def _leaves_float32(curves: Check, steps: int, tolerance: Tolerance) -> bool:
    """Return whether a long run leaves float32, at its end or step by step in its second half."""
    ends = or_infinity(curves.deviation) > tolerance.trajectory
    leaves = ends or or_infinity(curves.second_half) > SECOND_HALF_FACTOR * tolerance.trajectory
    return steps >= LONG_STEPS_SHARE * LONG_STEPS and leaves


def _check_losses_finite(points: Sequence[StepComparison]) -> Check:
    for point in points:
        if point.loss is None or not math.isfinite(point.loss):
            problem = f"the loss is not finite at the weights and batch of step {point.step}"
            return Check(problem=problem, step=point.step)
    return Check()


def _covered(evidence: ProofEvidence, checks: _Checks) -> tuple[str, ...]:
    covered = []
    if evidence.comparisons:
        steps = {
            point.step
            for point in (
                *evidence.comparisons,
                *evidence.late_comparisons,
                *evidence.headroom_comparisons,
            )
        }
        covered.append(f"{AT_THE_SAME_WEIGHTS} at steps {', '.join(map(str, sorted(steps)))}")
    if checks.buffers.judged:
        covered.append("what these steps leave in the model's buffers")
    covered += [f"a step on {each.batch}" for each in evidence.other_batches]
    if checks.evaluation.judged:
        covered.append("the model's outputs in evaluation")
    if checks.curves.judged:
        seeds = [run.candidate.seed for run in evidence.long_runs]
        rest = [run for run in evidence.runs if run.candidate.seed not in seeds]
        lengths = ", ".join(str(len(run.candidate.losses)) for run in (*evidence.long_runs, *rest))
        at = f" at batch {evidence.trained_batch}" if evidence.trained_batch else ""
        covered.append(f"trainings of {lengths} steps{at}")
    if checks.metric.judged:
        covered.append("evaluate(model)")
    return (*covered, *evidence.notes)


def check_floor(evidence: ProofEvidence, tolerance: Tolerance) -> Check:
    """Check for an error floor at all checkpoints of the float32 run."""
    longest = max((*evidence.long_runs, *evidence.runs), key=lambda run: len(run.reference.losses))
    points, noise = _all_checkpoints(evidence)
    return check_error_floor(points, noise, longest, tolerance)


def _all_checkpoints(
    evidence: ProofEvidence,
) -> tuple[tuple[StepComparison, ...], tuple[NoisyStep, ...]]:
    """Return the comparisons at the checkpoints of the float32 run, and what noise does there."""
    points = (*evidence.comparisons, *evidence.late_comparisons)
    return points, (*evidence.noise, *evidence.late_noise)


def _tells_enough(evidence: ProofEvidence, curves: Check, tolerance: Tolerance) -> bool:
    """Say whether the trainings suffice that were done before the time limit ended the proof.

    They do where they stayed close to float32 and nothing asks for longer ones: a proof of so few
    steps would have ended there.
    """
    if evidence.ended_by != "the time limit" or not curves.judged or not _is_close(curves):
        return False
    return not (evidence.long_runs or needs_longest_run(evidence, tolerance))


def _judge_untrained(numbers: Verdict, evidence: ProofEvidence, single: Check) -> Verdict:
    """Say that single steps are equal, if they are, and that no training was finished."""
    if evidence.comparisons and (single.passed or not evidence.ended_by):
        said = describe_untrained(numbers, evidence) + describe_shares(numbers)
        return replace(numbers, verdict="equal at single steps", reason=said)
    return replace(numbers, verdict="unproven", reason=describe_ended(evidence))
