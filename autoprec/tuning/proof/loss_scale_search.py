"""Tunes a float16 recipe's initial loss scale: measured, then confirmed by short trainings."""

from __future__ import annotations

from dataclasses import replace

from autoprec.backends.protocol import Tracer
from autoprec.core.numerics.loss_scale_choice import (
    MAX_EXPONENT,
    ScaleEvidence,
    growth_interval,
    initial_exponent,
    largest_safe_exponent,
    longest_streak,
    next_exponent,
    recommended_scale,
    scale_cost,
    underflow_share,
)
from autoprec.core.numerics.proof_steps import FIRST_STEPS
from autoprec.core.numerics.traces import ExponentHistogram, Trajectory
from autoprec.core.recipe import LossScale, Recipe

#: Batches whose gradient magnitudes are recorded.
HISTOGRAM_BATCHES = 8

#: Loss scales that are tried at most.
MAX_TRIALS = 4

#: Steps over which the scale is doubled to see what an overflow costs.
GROWTH_STEPS = 12


def loss_scale_from_backward(
    recipe: Recipe, tracer: Tracer, batches: int = HISTOGRAM_BATCHES
) -> LossScale:
    """Return the loss scale that the backward pass's magnitudes allow, without a training."""
    histogram = tracer.backward_exponents(recipe=recipe, batches=batches)
    return recommended_scale(_evidence(histogram, initial_exponent(histogram)))


def default_loss_scale(note: str) -> tuple[LossScale, ScaleEvidence]:
    """Return the default loss scale where nothing could be measured; `note` says why."""
    histogram = ExponentHistogram(largest=None, smallest=None)
    evidence = replace(_evidence(histogram, initial_exponent(histogram)), note=note)
    return recommended_scale(evidence), evidence


def tune_loss_scale(
    recipe: Recipe, tracer: Tracer, *, max_steps: int = FIRST_STEPS
) -> tuple[LossScale, ScaleEvidence, Trajectory]:
    """Choose the initial loss scale, confirmed by short float16 trainings; return the best's run.

    The first trial is the exponent that the backward pass's magnitudes allow; where it skips no
    step and loses next to no gradient, it is the only one. A loss that is not finite ends the
    search: no scale changes what the forward pass gives. Among equally cheap exponents the first
    one tried is chosen. A training takes the proof's own `FIRST_STEPS` steps, or twice its maximum
    `max_steps` where that is less.
    """
    histogram = tracer.backward_exponents(recipe=recipe, batches=HISTOGRAM_BATCHES)
    start = initial_exponent(histogram)
    tried: dict[int, tuple[float, float]] = {}
    runs: dict[int, Trajectory] = {}
    while len(tried) < MAX_TRIALS and (exponent := next_exponent(start, tried)) is not None:
        run = runs[exponent] = tracer.trajectory(
            recipe=replace(recipe, loss_scale=LossScale(initial=2.0**exponent)),
            seed=0,
            steps=confirmation_steps(max_steps),
        )
        skipped = len(run.skipped) / max(1, len(run.losses))
        tried[exponent] = skipped, underflow_share(histogram, exponent)
        if not run.finite:
            break
    best = min(tried, key=lambda exponent: scale_cost(*tried[exponent]))
    evidence = _evidence(histogram, best)
    if runs[best].finite:
        evidence = _growth(recipe, tracer, evidence)
    evidence = replace(
        evidence,
        skipped_steps=len(runs[best].skipped),
        steps=len(runs[best].losses),
        trials=len(tried),
    )
    return recommended_scale(evidence), evidence, runs[best]


def confirmation_steps(max_steps: int) -> int:
    """Return the steps of a training that confirms a loss scale, for a proof's maximum steps."""
    return min(FIRST_STEPS, 2 * max_steps)


def _growth(recipe: Recipe, tracer: Tracer, evidence: ScaleEvidence) -> ScaleEvidence:
    """Let the scale double every step, and measure what growing too far costs.

    In a real training it doubles every 2000 good steps, so overflows are as rare; a few steps show
    how many steps one of them skips.
    """
    if evidence.exponent + GROWTH_STEPS > MAX_EXPONENT:
        return evidence
    growing = LossScale(initial=2.0**evidence.exponent, growth_interval=1)
    run = tracer.trajectory(
        recipe=replace(recipe, loss_scale=growing),
        seed=0,
        steps=GROWTH_STEPS,
    )
    if not run.skipped:
        return evidence
    skips = longest_streak(run.skipped)
    return replace(
        evidence,
        overflow_exponent=evidence.exponent + run.skipped[0],
        skips_per_overflow=skips,
        growth_interval=growth_interval(skips),
    )


def _evidence(histogram: ExponentHistogram, exponent: int) -> ScaleEvidence:
    return ScaleEvidence(
        exponent=exponent,
        largest_safe=largest_safe_exponent(histogram),
        largest_gradient=histogram.largest,
        smallest_gradient=histogram.smallest,
        underflow=underflow_share(histogram, exponent),
        batches=histogram.batches,
        note="" if histogram.finite else "the backward pass itself gives inf or NaN",
    )
