"""The runs of a proof: what is recorded once, kept for a second recipe, and recorded again."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from autoprec.core.numerics import proof_steps
from autoprec.core.numerics.noise_scale import NoiseScale
from autoprec.core.numerics.traces import Trajectory
from autoprec.core.recipe import Recipe
from autoprec.errors import TaskError
from autoprec.tuning.proof.recipe_proof import Proof
from tests.tuning.proof.fake_tracer import BFLOAT16, FLOAT16, FakeTracer, falls
from tests.tuning.proof.test_recipe_proof_longer_runs import Leaning


def test_a_metric_that_falls_is_calibrated_on_every_seed():
    def calls(**known):
        tracer = FakeTracer(metric=0.9, **known)
        Proof(tracer).prove(BFLOAT16)
        return tracer.calls

    assert not {"noise", "noisy 0", "noisy 1"} & set(calls())
    assert {"noise", "noisy 0", "noisy 1"} <= set(calls(worse=0.1))


@pytest.mark.parametrize(
    ("known", "noise"),
    [
        ({"error": 0.0005}, []),
        ({"error": 0.01}, ["noise", "noisy 0"]),  # its training leaves float32's
        ({"step_error": 0.009}, []),
        ({"step_error": 0.03}, ["noise"]),  # training settles what failed there
        ({"step_error": 0.015, "error": 0.0015}, ["noise", "noisy 0"]),  # if it is as near as noise
        ({"step_error": None}, []),
    ],
)
def test_noise_is_measured_only_where_it_might_excuse_something(known, noise):
    tracer = FakeTracer(**known)
    Proof(tracer, steps=30).prove(BFLOAT16)
    assert [call for call in tracer.calls if call.startswith("nois")] == noise


def test_a_second_recipe_uses_what_is_known_of_float32():
    tracer = FakeTracer(error=0.0005)
    proof = Proof(tracer)
    proof.prove(BFLOAT16)
    tracer.calls.clear()
    proof.prove(replace(BFLOAT16, memory_format="channels_last"))
    assert tracer.calls == [
        "compare_settings",
        "compare_steps",
        "mixed_bfloat16 0",
        "mixed_bfloat16 1",
    ]


def test_another_batch_is_another_reference():
    tracer = FakeTracer()
    proof = Proof(tracer)
    proof.prove(BFLOAT16)
    proof.prove(replace(BFLOAT16, batch_size=16, accumulation_steps=2))
    assert "reference 16x2" in tracer.calls
    proof.forget()
    proof.prove(replace(BFLOAT16, batch_size=16, accumulation_steps=2))
    assert tracer.calls.count("reference 16x2") == 2


class Growing(FakeTracer):
    """float16 numbers that grow until step 29; whether they go on is `further`."""

    def __init__(self, *, further: float, **known: Any) -> None:
        super().__init__(**known)
        self.further = further

    def compare_steps(self, *, recipe):
        early = {0: 80.0, 2: 90.0, 8: 150.0, 29: 1200.0}
        return tuple(
            replace(p, largest=early.get(p.step, 1200.0 * self.further ** (p.step - 29)))
            for p in super().compare_steps(recipe=recipe)
        )


def test_numbers_that_grow_are_looked_at_further_on():
    tracer = Growing(further=1.0)
    proof = Proof(tracer)
    scale, _ = proof.tune_loss_scale(FLOAT16)
    tracer.steps = 0
    verdict = proof.prove(replace(FLOAT16, loss_scale=scale))
    assert verdict.accepted
    assert (
        verdict.covered[0]
        == "loss and gradient at the same weights at steps 0, 2, 8, 29, 34, 39, 44, 49, 54, 59"
    )
    assert tracer.steps <= 250
    assert Proof(Growing(further=1.1)).prove(FLOAT16).verdict == "drift"
    tracer.calls.clear()
    proof.prove(BFLOAT16)
    assert tracer.calls[0] == "reference 8x1"  # its checkpoints had been replaced


def test_where_float32_is_not_finite_further_on_nothing_is_looked_at_there():
    class Breaks(Growing):
        def reference(self, *, steps, **kwargs):
            run = super().reference(steps=steps, **kwargs)
            return replace(run, losses=(*run.losses[:33], None)) if steps > 30 else run

    tracer = Breaks(further=1.0)
    assert Proof(tracer, steps=30).prove(FLOAT16).verdict == "drift"
    assert tracer.calls.count("compare_steps") == 1


def test_a_verdict_does_not_depend_on_how_far_an_earlier_candidate_was_followed():
    other = replace(BFLOAT16, compile=True)
    for curve in (lambda step: 2.0, lambda step: 1.0 + falls(min(step, 50)), falls):
        proof = Proof(Leaning(other, curve=curve))
        assert proof.prove(other).steps == 480
        again = replace(proof.prove(BFLOAT16), seconds=0.0)
        assert again == replace(Proof(Leaning(curve=curve)).prove(BFLOAT16), seconds=0.0)


def test_a_second_recipe_is_judged_as_if_it_were_the_first():
    tracer = FakeTracer(curve=falls)
    proof = Proof(tracer)
    first = proof.prove(BFLOAT16)
    tracer.calls.clear()
    second = proof.prove(replace(BFLOAT16, memory_format="channels_last"))
    settings, *others = second.covered
    assert "channels_last in float32" in settings
    assert replace(second, seconds=0.0, covered=tuple(others)) == replace(first, seconds=0.0)
    assert "reference 8x1" not in tracer.calls
    tracer.step_error = 0.03
    failed = proof.prove(BFLOAT16)
    alone = Proof(FakeTracer(curve=falls, step_error=0.03)).prove(BFLOAT16)
    assert replace(failed, seconds=0.0) == replace(alone, seconds=0.0)


def test_checkpoints_without_memory_are_said():
    class Small(FakeTracer):
        def compare_steps(self, *, recipe):
            return super().compare_steps(recipe=recipe)[:2]

    assert "no memory" in Proof(Small()).prove(BFLOAT16).not_covered[0]


def test_replayed_data_are_said():
    assert "replayed" in Proof(FakeTracer(reproducible=False)).prove(BFLOAT16).covered[-1]


def test_the_metric_of_a_longer_run_is_not_compared():
    verdict = Proof(FakeTracer(metric=0.5)).prove(BFLOAT16)
    assert (verdict.metric, verdict.metric_reference) == (0.5, 0.5)


def test_a_float32_that_is_not_finite_itself_proves_nothing_and_says_where() -> None:
    class Diverges(FakeTracer):
        def reference(self, **kwargs: Any) -> Trajectory:
            run = super().reference(**kwargs)
            return replace(run, losses=(*run.losses[:3], None, *run.losses[4:]))

    with pytest.raises(TaskError, match=r"in float32 the loss is inf or NaN at step 3 \(counted"):
        Proof(Diverges()).prove(BFLOAT16)


class Noisy(FakeTracer):
    """Gradients of which a half is noise, at each checkpoint."""

    def compare_steps(self, *, recipe):
        return tuple(
            replace(point, noise_share=0.5) for point in super().compare_steps(recipe=recipe)
        )


def test_the_noise_scale_is_seen_in_a_short_training_of_float32_alone():
    tracer = Noisy()
    found = Proof(tracer).measure_noise_scale(Recipe(batch_size=16))
    assert found == NoiseScale(16.0, 16.0, 16.0, 16, 0, 29)
    assert tracer.calls == ["reference 16x1", "compare_steps"]
    assert tracer.steps < 2 * proof_steps.SHORT_STEPS


def test_where_gradients_or_time_are_missing_there_is_no_noise_scale():
    assert Proof(FakeTracer()).measure_noise_scale(Recipe()) is None
    late = Proof(Noisy(stalls_after=12), until=time.monotonic() + 1e3)
    assert late.measure_noise_scale(Recipe()) is None
