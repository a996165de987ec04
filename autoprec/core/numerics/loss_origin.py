"""Finds the constant in a loss: a log-likelihood may leave one out, an ELBO may add another.

Training does not see it, so no verdict may depend on it. How far a loss is from float32's is a
share of the loss; so a large constant would hide a difference, and a loss that crosses zero would
make one of nothing. `python -m benchmarks.numerics.loss_constants` counts how often.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace

from autoprec.core.numerics.traces import above
from autoprec.core.numerics.verdict import ProofEvidence

SMALLEST_HEIGHT_SHARE = 0.1
"""A loss counts as at least this share of what it is, however little it varies."""


def loss_origin(losses: Iterable[float | None]) -> float:
    """Return what to subtract from a loss, so that shares of the rest mean something; often 0.

    `losses` are float32's, step by step. The smallest of them lies no higher above the origin than
    they vary, and no lower than `SMALLEST_HEIGHT_SHARE` of what it is. A loss that is never
    negative keeps its zero if that is nearer; one that becomes negative has no zero of its own.
    """
    known = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    if not known or min(known) == max(known):
        return 0.0
    smallest = min(known)
    height = max(max(known) - smallest, SMALLEST_HEIGHT_SHARE * abs(smallest))
    return smallest - height if smallest < 0.0 else max(0.0, smallest - height)


def above_origin(evidence: ProofEvidence) -> ProofEvidence:
    """Return the evidence with all losses counted from their origin."""
    if evidence.loss_origin != 0.0:
        return evidence  # they are already
    seeds = [run.reference.losses for run in (*evidence.runs, *evidence.long_runs)]
    origin = loss_origin(itertools.chain(evidence.float32_losses, *seeds))
    run = evidence.candidate_run
    return replace(
        evidence,
        comparisons=tuple(each.above(origin) for each in evidence.comparisons),
        late_comparisons=tuple(each.above(origin) for each in evidence.late_comparisons),
        other_batches=tuple(each.above(origin) for each in evidence.other_batches),
        noise=tuple(each.above(origin) for each in evidence.noise),
        other_noise=tuple(each.above(origin) for each in evidence.other_noise),
        late_noise=tuple(each.above(origin) for each in evidence.late_noise),
        runs=tuple(each.above(origin) for each in evidence.runs),
        long_runs=tuple(each.above(origin) for each in evidence.long_runs),
        candidate_run=None if run is None else run.above(origin),
        float32_losses=above(evidence.float32_losses, origin),
        loss_origin=origin,
    )
