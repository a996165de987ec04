"""The search for a loss scale, with a tracer whose trainings overflow above a given exponent."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import pytest

from autoprec.backends.protocol import Tracer
from autoprec.core.numerics.loss_scale_choice import DEFAULT_EXPONENT, ScaleEvidence
from autoprec.core.numerics.proof_steps import FIRST_STEPS
from autoprec.core.numerics.traces import ExponentHistogram, Trajectory
from autoprec.core.recipe import LossScale, Recipe
from autoprec.tuning.proof.loss_scale_search import (
    GROWTH_STEPS,
    HISTOGRAM_BATCHES,
    MAX_TRIALS,
    confirmation_steps,
    default_loss_scale,
    loss_scale_from_backward,
    tune_loss_scale,
)
from tests.tuning.proof.fake_tracer import FLOAT16, FakeTracer

PLAIN = {"-2": 1.0}


class Overflowing:
    """A training skips its first steps where the scale is above 2**`overflow`."""

    def __init__(
        self, overflow: float = 99.0, *, largest: int | None = -2, counts: Any = None
    ) -> None:
        self.overflow, self.largest, self.counts = overflow, largest, counts or PLAIN
        self.tried: list[tuple[float, int]] = []
        self.grown: list[LossScale] = []
        self.batches = 0

    def backward_exponents(self, *, recipe: Recipe, batches: int) -> ExponentHistogram:
        assert recipe == FLOAT16
        self.batches = batches
        return ExponentHistogram(self.largest, -20, self.counts, batches)

    def trajectory(self, *, recipe: Recipe, seed: int, steps: int) -> Trajectory:
        scale = recipe.loss_scale
        assert scale is not None
        assert seed == 0
        exponent = math.log2(scale.initial)
        if scale.growth_interval == 1:
            self.grown.append(scale)
            first = max(0, math.ceil(self.overflow - exponent + 1e-9))
            return Trajectory((1.0,) * steps, skipped=tuple(range(first, min(steps, first + 3))))
        self.tried.append((exponent, steps))
        skipped = tuple(range(math.ceil(max(0.0, exponent - self.overflow))))
        return Trajectory((1.0,) * steps, skipped=skipped)


def tuned(tracer: Overflowing, **limits: int) -> tuple[LossScale, ScaleEvidence, Trajectory]:
    return tune_loss_scale(FLOAT16, cast(Tracer, tracer), **limits)


def test_where_the_analytic_scale_skips_nothing_it_is_the_only_one_tried() -> None:
    """Float16 ends below 2**16: gradients below 2**-1 allow 2**17, and four octaves are left."""
    tracer = Overflowing()
    scale, evidence, run = tuned(tracer)
    assert tracer.tried == [(13.0, FIRST_STEPS)]
    assert tracer.batches == evidence.batches == HISTOGRAM_BATCHES
    assert scale == LossScale("dynamic", 2.0**13, 2000, 2.0**5)
    assert (evidence.exponent, evidence.largest_safe, evidence.trials) == (13, 17, 1)
    assert (evidence.skipped_steps, evidence.steps, len(run.losses)) == (
        0,
        FIRST_STEPS,
        FIRST_STEPS,
    )
    assert (evidence.largest_gradient, evidence.smallest_gradient) == (-2, -20)


def test_a_scale_that_overflows_is_lowered_twice_as_far_each_time() -> None:
    tracer = Overflowing(8.5)
    scale, evidence, run = tuned(tracer)
    assert [exponent for exponent, _ in tracer.tried] == [13.0, 11.0, 7.0]
    assert scale.initial == 2.0**7
    assert (evidence.trials, evidence.skipped_steps, run.skipped) == (3, 0, ())


def test_after_the_last_trial_the_one_that_skipped_least_is_taken() -> None:
    tracer = Overflowing(-40.0)
    scale, evidence, run = tuned(tracer)
    assert [exponent for exponent, _ in tracer.tried] == [13.0, 11.0, 7.0, -1.0]
    assert len(tracer.tried) == MAX_TRIALS
    assert scale.initial == 2.0**-1
    assert evidence.skipped_steps == len(run.skipped) == 39


def test_a_loss_that_is_not_finite_ends_the_search_for_no_scale_mends_it() -> None:
    class Broken(Overflowing):
        def trajectory(self, *, recipe: Recipe, seed: int, steps: int) -> Trajectory:
            run = super().trajectory(recipe=recipe, seed=seed, steps=steps)
            return replace(run, losses=(None, *run.losses[1:]))

    tracer = Broken(8.5)
    _, evidence, _ = tuned(tracer)
    assert (len(tracer.tried), evidence.trials) == (1, 1)
    assert tracer.grown == []
    assert evidence.overflow_exponent is None


def test_a_scale_that_loses_much_of_the_gradient_is_raised() -> None:
    """What lies below 2**-24 is zero in float16: a third of this gradient, at scale 2**-10."""
    tracer = Overflowing(largest=21, counts={"-14": 1.0, "-15": 1.0})
    scale, evidence, _ = tuned(tracer)
    assert [exponent for exponent, _ in tracer.tried] == [-10.0, -8.0]
    assert scale.initial == 2.0**-8
    assert evidence.underflow == 0.0


@pytest.mark.parametrize(("most", "steps"), [(8, 16), (30, 60), (400, 60)])
def test_a_training_is_that_of_the_proofs_first_steps_and_at_most_twice_its_longest(
    most: int, steps: int
) -> None:
    tracer = Overflowing()
    tuned(tracer, max_steps=most)
    assert tracer.tried[0][1] == confirmation_steps(most) == steps


def test_how_often_a_scale_grows_depends_on_what_growing_too_far_costs() -> None:
    tracer = Overflowing(15.5)
    scale, evidence, _ = tuned(tracer)
    (grown,) = tracer.grown
    assert (grown.initial, grown.growth_interval) == (2.0**13, 1)
    assert (evidence.overflow_exponent, evidence.skips_per_overflow) == (16, 3)
    assert scale.growth_interval == evidence.growth_interval == 3000


def test_a_scale_that_never_grew_too_far_grows_as_usual() -> None:
    _, evidence, _ = tuned(Overflowing())
    assert evidence.overflow_exponent is None
    assert evidence.growth_interval == 2000


@pytest.mark.parametrize(("largest", "grows"), [(-103, True), (-104, False)])
def test_no_scale_grows_beyond_float32(largest: int, grows: bool) -> None:
    tracer = Overflowing(200.0, largest=largest, counts={str(largest): 1.0})
    tuned(tracer)
    exponent = 15 - largest - 4
    assert tracer.tried[0][0] == exponent
    assert bool(tracer.grown) is grows
    assert grows is (exponent + GROWTH_STEPS <= 126)


def test_without_a_training_the_magnitudes_alone_decide() -> None:
    tracer = Overflowing(0.0)
    assert loss_scale_from_backward(FLOAT16, cast(Tracer, tracer), 3) == LossScale(
        "dynamic", 2.0**13, 2000, 2.0**5
    )
    assert (tracer.batches, tracer.tried) == (3, [])


def test_where_nothing_was_measured_it_is_the_usual_scale_with_a_note() -> None:
    scale, evidence = default_loss_scale("no time")
    assert scale.initial == 2.0**DEFAULT_EXPONENT
    assert (evidence.note, evidence.largest_safe, evidence.trials) == ("no time", None, 0)


def test_a_backward_pass_that_is_not_finite_is_noted() -> None:
    class Broken(FakeTracer):
        def backward_exponents(self, *, recipe, batches):
            return ExponentHistogram(-2, -20, {}, batches, finite=False)

    _, evidence, _ = tune_loss_scale(FLOAT16, cast(Tracer, Broken()))
    assert evidence.note == "the backward pass itself gives inf or NaN"


def test_among_equally_bad_exponents_the_first_one_tried_is_chosen() -> None:
    class Skipping(Overflowing):
        """Every step of every training is skipped."""

        def trajectory(self, *, recipe: Recipe, seed: int, steps: int) -> Trajectory:
            run = super().trajectory(recipe=recipe, seed=seed, steps=steps)
            return replace(run, skipped=tuple(range(steps)))

    tracer = Skipping()
    _, evidence, run = tuned(tracer)
    assert len(tracer.tried) == evidence.trials == MAX_TRIALS
    assert evidence.exponent == tracer.tried[0][0]
    assert evidence.skipped_steps == len(run.skipped) == FIRST_STEPS


def test_tuning_a_loss_scale_leaves_optunas_verbosity_alone() -> None:
    import optuna

    before = optuna.logging.get_verbosity()
    try:
        optuna.logging.set_verbosity(optuna.logging.DEBUG)
        tuned(Overflowing())
        assert optuna.logging.get_verbosity() == optuna.logging.DEBUG
    finally:
        optuna.logging.set_verbosity(before)
