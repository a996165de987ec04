"""Evidence made by hand, for the judge's tests."""

from __future__ import annotations

from autoprec.core.numerics.loss_curves import SeedRun
from autoprec.core.numerics.tolerance import Tolerance
from autoprec.core.numerics.traces import NoisyStep, StepComparison, Trajectory
from autoprec.core.numerics.verdict import ProofEvidence

DEFAULT = Tolerance()
FALLING = tuple(2.0 * 0.95**step for step in range(30))


def run(losses=FALLING, **kwargs) -> Trajectory:
    return Trajectory(losses=tuple(losses), **kwargs)


def times(factor: float, losses=FALLING) -> Trajectory:
    return run(loss * factor for loss in losses)


def drifting(rate: float) -> Trajectory:
    return run(loss * (1 + rate * step) for step, loss in enumerate(FALLING))


def points(deviation: float = 0.0, error: float | None = 0.01) -> tuple[StepComparison, ...]:
    return tuple(StepComparison(s, 2.0 * (1 + deviation), 2.0, error) for s in (0, 2, 8, 29))


def evidence(candidate: Trajectory, **kwargs) -> ProofEvidence:
    pair = SeedRun(run(), candidate, times(1.0001))
    defaults = {"comparisons": points(), "noise": (NoisyStep(0, 2.001, 2.0, 0.01),)}
    return ProofEvidence(**(defaults | kwargs), runs=(pair, pair))
