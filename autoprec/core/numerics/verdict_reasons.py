"""Puts into words what a proof found: what was compared, how far, and what that leaves open."""

from __future__ import annotations

import math

from autoprec.core.number_words import percent
from autoprec.core.numerics.tolerance import Check, or_infinity
from autoprec.core.numerics.verdict import ProofEvidence, Verdict

NOTHING_LEARNED = "the loss did not fall in these steps, so they say little about later training"
"""What is to be known of a proof over steps in which nothing was learned."""

HOW_TO_SEE_LEARNING = (
    "start from weights that have trained for a while (`checkpoint`), or give the proof more steps "
    "(`proof_steps`)"
)
"""What to do about that."""


def describe_single_steps(numbers: Verdict) -> str:
    """Say how near the loss was at the same weights; empty where it was not compared."""
    if numbers.loss_deviation is None:
        return ""
    return f"loss within {percent(numbers.loss_deviation)} at the same weights"


def describe_end(curves: Check, steps: int) -> str:
    """Describe how far training ended from float32."""
    ended, late = percent(or_infinity(curves.deviation)), percent(or_infinity(curves.second_half))
    return f"after {steps} steps it is {ended} away, and single steps by then {late}"


def describe_success(numbers: Verdict, ended: Check, evidence: ProofEvidence) -> str:
    """Describe what passed and over which part of training; `ended` is the longest runs' check."""
    loss = _from_to(or_infinity(numbers.first_loss), or_infinity(numbers.last_loss))
    start = evidence.start
    parts = [describe_single_steps(numbers), _describe_passed(ended, numbers.steps)]
    over = f"{numbers.steps} steps from {start}" if start else f"the first {numbers.steps} steps"
    told = (
        f"trains like float32: equal over {over}, loss {loss}; "
        f"{', '.join(part for part in parts if part)}"
    )
    if numbers.caveat:
        told += f"; {numbers.caveat}"
    if numbers.buffers:
        told += f"; {numbers.buffers}"
    if evidence.coarse:
        told += (
            f"; in {evidence.coarse}, {numbers.steps} steps show gross failures only: compare a "
            "longer training by its metric"
        )
    if evidence.trained_batch:
        told += f"; trained at batch {evidence.trained_batch}"
    if evidence.ranks:
        told += f"; proven at {evidence.ranks}"
    if numbers.not_covered:
        told += f" (not covered: {'; '.join(numbers.not_covered)})"
    return told


def _from_to(first: float, last: float) -> str:
    """Describe how a loss went, in as many digits as show it: two at least, five at most."""
    size, change = max(abs(first), abs(last)), abs(first - last)
    digits = 2
    if 0.0 < change < math.inf:
        digits = min(5, max(2, 1 + math.ceil(math.log10(size / change))))
    return f"{first:.{digits}g} to {last:.{digits}g}"


def _describe_passed(ended: Check, steps: int) -> str:
    """Say where runs that passed ended, and why a difference that is left does not count."""
    if ended.below is not None:
        why = f"chance: {ended.excused}" if ended.excused else "not compared"
        return (
            f"both end below {percent(ended.below)} of the first loss after {steps} steps, where "
            f"their difference is {why}"
        )
    away = percent(or_infinity(ended.deviation))
    if ended.excused:
        return f"{away} away after {steps} steps, which is chance: {ended.excused}"
    return f"within {away} after {steps} steps"
