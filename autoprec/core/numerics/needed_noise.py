"""Says where noise is to be measured: only where a test fails without it.

Noise excuses a deviation and never adds one: what passes every test without it passes with it. So
float32 with noisy weights need not run for most candidates. If noise destroys float32's own
gradients it excuses nothing, and noisy trainings are not needed either.
"""

from __future__ import annotations

from autoprec.core.numerics.judging import (
    check_all_buffers,
    check_all_evaluations,
    check_all_other_batches,
    check_first_steps,
    check_floor,
    judge,
    training_clears,
)
from autoprec.core.numerics.late_failures import needs_more_steps
from autoprec.core.numerics.loss_curves import check_metric, check_stability, check_trajectory
from autoprec.core.numerics.loss_origin import above_origin
from autoprec.core.numerics.proof_steps import SHORT_STEPS
from autoprec.core.numerics.single_step import is_noise_sensitive
from autoprec.core.numerics.tolerance import Tolerance
from autoprec.core.numerics.verdict import ProofEvidence


def needs_noise_at_checkpoints(evidence: ProofEvidence, tolerance: Tolerance) -> bool:
    """Return whether noise might excuse what differs at the same weights."""
    if evidence.noise or not _is_finite(evidence):
        return False
    buffers = check_all_buffers(evidence, tolerance)
    if not check_first_steps(evidence, tolerance).passed or not buffers.passed:
        return True
    if not check_all_evaluations(evidence, tolerance).passed:
        return True
    if not check_all_other_batches(evidence, tolerance).passed:
        return True
    trained = evidence.runs or evidence.long_runs
    floor_fails = trained and not check_floor(above_origin(evidence), tolerance).passed
    return bool(buffers.differing or floor_fails)


def needs_noisy_trainings(evidence: ProofEvidence, tolerance: Tolerance) -> bool:
    """Return whether noise might excuse what differs in the trainings of the first steps.

    Runs of more than `SHORT_STEPS` are settled by float32 alone, but for the task's own metric.
    """
    metric = any(run.reference.metric is not None for run in evidence.runs)
    steps = max((len(run.reference.losses) for run in evidence.runs), default=0)
    if any(run.noisy for run in evidence.runs) or not (metric or 0 < steps <= SHORT_STEPS):
        return False
    if is_noise_sensitive(evidence.noise, tolerance) or not _is_finite(evidence):
        return False
    evidence = above_origin(evidence)
    if not check_stability((run.candidate for run in evidence.runs), tolerance).passed:
        return False
    curves = check_trajectory(evidence.runs, tolerance)
    scores = check_metric((*evidence.long_runs, *evidence.runs), tolerance)
    if not curves.passed or not scores.passed:
        return True
    single = check_first_steps(evidence, tolerance)
    cleared = training_clears(single, curves, steps, tolerance, evidence.roundoff)
    return bool(not single.passed and single.undecided and curves.judged and not cleared)


def needs_noisy_long_runs(evidence: ProofEvidence, tolerance: Tolerance) -> bool:
    """Return whether noise might excuse where long runs over several seeds end."""
    decided = judge(evidence, tolerance).accepted
    return not decided or needs_more_steps(above_origin(evidence).long_runs, tolerance)


def _is_finite(evidence: ProofEvidence) -> bool:
    """Say whether all losses at the same weights are finite; noise excuses none that is not."""
    points = (*evidence.comparisons, *evidence.late_comparisons)
    return all(point.loss is not None for point in points)
