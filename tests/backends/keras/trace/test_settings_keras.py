"""Splitting and XLA are compared with plain float32; noise is alike in all dtypes."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Recipe
from autoprec.tuning.proof.recipe_proof import Proof
from tests.backends.keras.keras_models import compiled
from tests.backends.keras.trace.test_tracer import tracer

SPLIT = Recipe(batch_size=4, accumulation_steps=2)


def noisy(loss="mse", normalised=False):
    layers = [
        keras.layers.Input((8,)),
        keras.layers.Dense(16),
        keras.layers.GaussianNoise(0.5),
        keras.layers.AlphaDropout(0.3),
        *([keras.layers.BatchNormalization()] if normalised else []),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential(layers)
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss=loss)
    return model


def samples(batch_size):
    """Targets of which many are zero, from the fifth batch on."""
    random = np.random.default_rng(0)
    for step in range(40):
        x = random.normal(size=(batch_size, 8)).astype("float32")
        y = x[:, :1] ** 2 + 0.1
        if step >= 4:
            y *= random.random(y.shape) < 0.5
        yield x, y.astype("float32")


def mean_over_targets(y, predicted):
    """A loss that divides by what it counts in the batch."""
    counts = keras.ops.cast(keras.ops.not_equal(y, 0.0), "float32")
    error = keras.ops.sum(counts * keras.ops.square(y - predicted))
    return error / keras.ops.maximum(keras.ops.sum(counts), 1.0)


def test_a_batch_that_may_be_split_is_equal_with_dropout_and_noise_off():
    verdict = Proof(tracer(noisy, samples), steps=30).prove(SPLIT)
    assert verdict.accepted
    assert "with 2 micro-batches of 4, outputs, loss and gradient of 5 batches" in verdict.reason
    assert verdict.steps == 0


@pytest.mark.parametrize(
    "build", [lambda: noisy(mean_over_targets), lambda: noisy(normalised=True)]
)
def test_a_loss_that_counts_and_samples_that_mix_are_not_split(build):
    proof = Proof(tracer(build, samples), steps=30)
    for policy in (Policy.FLOAT32, Policy.MIXED_BFLOAT16):
        verdict = proof.prove(SPLIT.with_policy(policy))
        assert verdict.verdict == "rejected"
        assert "with 2 micro-batches of 4 it computes something else" in verdict.reason


def test_a_compiled_recipe_computes_what_plain_float32_does():
    traced = tracer(lambda: compiled(keras.Sequential([keras.layers.Dense(4, "softmax")])))
    settings = Proof(traced, steps=30).compare_settings(
        Recipe(Policy.MIXED_BFLOAT16, batch_size=8, compile=True)
    )
    assert settings is not None
    assert settings.accepted
    assert "with compiled, outputs, loss and gradient" in settings.verdict.reason


def test_a_bfloat16_step_has_the_noise_of_the_float32_step():
    traced = tracer(noisy, samples)
    traced.reference(batch_size=8, steps=2, checkpoints=(0, 1))
    for point in traced.compare_steps(recipe=Recipe(Policy.MIXED_BFLOAT16, batch_size=8)):
        assert point.loss == pytest.approx(point.reference, rel=0.03)
        assert point.gradient_error < 0.1
