"""What breaks in 16 bits is caught from a few steps, and what trains well is not accused."""

from __future__ import annotations

import json

import keras
import pytest
from measure_truth import BATCH, NAMES, TRUTH, expected, measure, tracer, tuned

from autoprec.core.dtypes import Policy
from autoprec.core.judge import Tolerance, shadow
from autoprec.core.recipe import Recipe

POLICIES = (Policy.MIXED_BFLOAT16, Policy.MIXED_FLOAT16)
MEASURED = json.loads(TRUTH.read_text())


def test_every_task_has_its_truth_measured():
    assert set(MEASURED) == set(NAMES)
    assert len(NAMES) >= 10


@pytest.mark.parametrize("name", NAMES)
def test_what_the_author_said_is_what_long_runs_show(name):
    found = {policy.value: MEASURED[name][policy.value]["truth"] for policy in POLICIES}
    assert found == expected(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cosine_similarity"])
def test_what_was_measured_is_measured_again(name):
    """For a fifth of the steps: one policy breaks its training, the other does not."""
    keras.utils.clear_session(free_memory=False)
    found = measure(name, steps=40, seeds=(0,))
    assert {policy.value: found[policy.value]["truth"] for policy in POLICIES} == expected(name)
    assert set(expected(name).values()) == {"broken", "healthy"}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_shadow_tells_broken_from_healthy(name):
    keras.utils.clear_session(free_memory=False)
    traced = tracer(name)
    traced.reference(batch_size=BATCH, steps=9, checkpoints=(0, 2, 8))
    noise = traced.noise(draws=3)
    for policy in POLICIES:
        check = shadow(traced.shadow(recipe=tuned(policy, traced)), noise, Tolerance())
        assert check.passed is (expected(name)[policy.value] == "healthy"), (policy, check)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "island"), [("float_positions", "sinusoids"), ("rms_norm", "root_mean_square")]
)
def test_an_island_mends_what_one_layer_breaks(name, island):
    traced = tracer(name)
    traced.reference(batch_size=BATCH, steps=3, checkpoints=(0, 2))
    policy = Policy.MIXED_BFLOAT16 if name == "float_positions" else Policy.MIXED_FLOAT16
    broken = tuned(policy, traced)
    mended = Recipe(
        policy=policy,
        batch_size=BATCH,
        loss_scale=broken.loss_scale,
        float32_modules=(island,),
    )
    noise = traced.noise(draws=3)
    assert not shadow(traced.shadow(recipe=broken), noise, Tolerance()).passed
    assert shadow(traced.shadow(recipe=mended), noise, Tolerance()).passed
