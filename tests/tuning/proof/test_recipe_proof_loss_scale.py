"""The loss scale that a proof measures before it judges a float16 recipe."""

from __future__ import annotations

from autoprec.tuning.proof.recipe_proof import Proof
from tests.tuning.proof.fake_tracer import FLOAT16, FakeTracer


def test_the_scale_is_measured_and_confirmed_by_one_trial():
    scale, evidence = Proof(FakeTracer(largest=-2)).tune_loss_scale(FLOAT16)
    assert scale.initial == 2.0**13
    assert scale.floor == 2.0**5
    assert (evidence.largest_safe, evidence.trials, evidence.skipped_steps) == (17, 1, 0)


def test_a_scale_that_skips_steps_is_tried_lower():
    scale, evidence = Proof(FakeTracer(largest=-2, overflow=9.5)).tune_loss_scale(FLOAT16)
    assert scale.initial == 2.0**7
    assert evidence.skipped_steps == 0
    assert evidence.trials == 3


def test_a_scale_that_loses_gradient_is_tried_higher():
    tracer = FakeTracer(largest=8, counts={"-28": 0.5, "-27": 0.5})
    scale, evidence = Proof(tracer).tune_loss_scale(FLOAT16)
    assert scale.initial == 2.0**5
    assert evidence.underflow == 0.0
    assert evidence.trials == 2


def test_what_growing_too_far_costs_is_measured():
    scale, evidence = Proof(FakeTracer(largest=-2, overflow=17.0)).tune_loss_scale(FLOAT16)
    assert (evidence.overflow_exponent, evidence.skips_per_overflow) == (18, 1)
    assert scale.growth_interval == 2000


def test_a_scale_that_needs_many_steps_to_come_back_grows_less_often():
    tracer = FakeTracer(largest=-2, overflow=17.0, recovery=0.25)
    scale, evidence = Proof(tracer).tune_loss_scale(FLOAT16)
    assert evidence.skips_per_overflow == 4
    assert scale.growth_interval == 4000


def test_a_scale_that_never_overflows_keeps_the_usual_interval():
    scale, evidence = Proof(FakeTracer(largest=-2)).tune_loss_scale(FLOAT16)
    assert evidence.overflow_exponent is None
    assert scale.growth_interval == 2000
