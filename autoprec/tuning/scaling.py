"""Tunes a float16 recipe's initial loss scale: measured, then confirmed by short trainings."""

from __future__ import annotations

from dataclasses import replace

from autoprec.backends.base import Tracer
from autoprec.core.loss_scale import (
    HIGHEST,
    LOWEST,
    ScaleEvidence,
    candidates,
    initial_exponent,
    largest_safe_exponent,
    loss_scale,
    objective,
    underflow,
)
from autoprec.core.recipe import LossScale, Recipe
from autoprec.core.trace import ExponentHistogram

BATCHES = 8
STEPS = 20
TRIALS = 4
NEGLIGIBLE = 1e-3
"""A share of the gradient that may underflow without a further trial."""


def analytic(recipe: Recipe, tracer: Tracer, batches: int = BATCHES) -> LossScale:
    """The loss scale that the backward pass's magnitudes allow, without a training."""
    histogram = tracer.backward_exponents(recipe=recipe, batches=batches)
    return loss_scale(_evidence(histogram, initial_exponent(histogram)))


def tune_loss_scale(
    recipe: Recipe, tracer: Tracer, *, seconds: float | None = None
) -> tuple[LossScale, ScaleEvidence]:
    """Choose the initial loss scale and confirm it by short trainings in float16.

    Optuna holds the trials over the exponent, seeded and in memory. The analytic start is the first
    one; where it skips no step and loses next to no gradient, it is the only one.
    """
    import optuna

    histogram = tracer.backward_exponents(recipe=recipe, batches=BATCHES)
    start = initial_exponent(histogram)
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
        skips: dict[int, tuple[int, int]] = {}
        scores: dict[int, float] = {}
        while len(scores) < TRIALS and (proposed := candidates(start, scores)):
            study.enqueue_trial({"exponent": proposed[0]})
            trial = study.ask()
            exponent = trial.suggest_int("exponent", LOWEST, HIGHEST)
            run = tracer.trajectory(
                recipe=replace(recipe, loss_scale=LossScale(initial=2.0**exponent)),
                seed=0,
                steps=STEPS,
                seconds=None if seconds is None else seconds / TRIALS,
            )
            lost = underflow(histogram, exponent)
            skips[exponent] = len(run.skipped), len(run.losses)
            scores[exponent] = objective(*skips[exponent], lost)
            study.tell(trial, scores[exponent])
            if not run.skipped and lost < NEGLIGIBLE:
                break
    finally:
        optuna.logging.set_verbosity(before)
    best = min(scores, key=lambda e: (scores[e], abs(e - start)))
    skipped, steps = skips[best]
    evidence = replace(
        _evidence(histogram, best), skipped_steps=skipped, steps=steps, trials=len(scores)
    )
    return loss_scale(evidence), evidence


def _evidence(histogram: ExponentHistogram, exponent: int) -> ScaleEvidence:
    return ScaleEvidence(
        exponent=exponent,
        largest_safe=largest_safe_exponent(histogram),
        largest_gradient=histogram.largest,
        smallest_gradient=histogram.smallest,
        underflow=underflow(histogram, exponent),
        batches=histogram.batches,
        note="" if histogram.finite else "the backward pass itself gives inf or NaN",
    )
