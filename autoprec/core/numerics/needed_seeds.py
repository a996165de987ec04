"""Says whether a second seed's training can change a verdict: what is lost already needs none."""

from __future__ import annotations

from dataclasses import replace

from autoprec.core.numerics.loss_curves import SeedRun, check_stability, check_trajectory
from autoprec.core.numerics.loss_origin import above_origin
from autoprec.core.numerics.tolerance import Tolerance, or_infinity
from autoprec.core.numerics.traces import Trajectory
from autoprec.core.numerics.verdict import ProofEvidence

LARGEST_SPREAD = 2.0
"""Two positive numbers are no further apart, relative to their mean."""


def is_lost(evidence: ProofEvidence, other: Trajectory | None, tolerance: Tolerance) -> bool:
    """Return whether the one training so far rejects a candidate, whatever a second one does.

    It does if it fails beside one that stays exactly with float32. `other` is float32's training
    from the second seed. Where that is not known, float32's seeds may end `LARGEST_SPREAD` apart,
    and where its loss has its origin depends on it.
    """
    (run,) = evidence.runs
    if not check_stability((run.candidate,), tolerance).passed:
        return True
    best = run.reference if other is None else other
    evidence = above_origin(replace(evidence, runs=(run, SeedRun(best, best))))
    found = check_trajectory(evidence.runs, tolerance)
    if found.passed or other is not None:
        return not found.passed
    return evidence.loss_origin == 0.0 and or_infinity(found.deviation) > LARGEST_SPREAD
