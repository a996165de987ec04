"""Splitting and XLA are compared with plain float32; noise is alike in all dtypes."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from autoprec.backends.keras.trace.model_under_recipe import KerasTrainee
from autoprec.backends.protocol import Task
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
    assert "2 micro-batches of 4, outputs, loss, gradient and evaluation of 5" in verdict.reason
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
    assert "with compiled, outputs, loss, gradient and evaluation" in settings.verdict.reason


class Compiled(keras.Model):
    """A model that computes something else when it is compiled with XLA, in what `where` names."""

    def __init__(self, where=""):
        super().__init__()
        self.where = where
        self.hidden = keras.layers.Dense(8)
        self.norm = keras.layers.BatchNormalization()
        self.head = keras.layers.Dense(1)
        self.held = {"sum": tf.Variable(0.0), "count": tf.Variable(0)}

    def differs(self, what):
        return 0.05 if what == self.where and self.jit_compile else 0.0

    def call(self, x, training=False):
        x = self.norm(self.hidden(x), training=training)
        if training:
            added = 1.0 + self.differs("buffer")
            self.held["count"].assign_add(2 if self.differs("count") else 1)
            self.held["sum"].assign_add(added * keras.ops.mean(keras.ops.square(x)))
        else:
            x = x + self.differs("outputs") * keras.ops.square(x)
        return self.head(x)

    def test_step(self, given):
        logs = super().test_step(given)
        if self.where == "raises":
            raise RuntimeError("only of use in training")
        return {"loss": logs["loss"] * (1.0 + self.differs("loss"))}


def settings_of(where, **more):
    def build():
        model = Compiled(where)
        model.compile(keras.optimizers.SGD(1e-3), "mse")
        return model

    recipe = Recipe(batch_size=8, compile=True)
    return Proof(tracer(build, samples, **more), steps=30).compare_settings(recipe)


@pytest.mark.parametrize(
    ("where", "told"),
    [
        ("buffer", "its buffer held['sum'] changes"),
        pytest.param("count", "its buffer held['count'] changes", marks=pytest.mark.slow),
        ("outputs", "its evaluation is"),
        pytest.param("loss", "its evaluation is 5", marks=pytest.mark.slow),
    ],
)
def test_buffers_and_evaluation_are_compared_with_the_unset_models(where, told):
    settings = settings_of(where)
    assert not settings.accepted
    assert f"than plain float32 does at the same weights: {told}" in settings.verdict.reason


def metric(model):
    """Draw data of its own."""
    x = np.random.normal(size=(16, 8)).astype("float32")
    return float(np.mean(np.square(model.predict(x, verbose=0)))) * (1.0 + model.differs("metric"))


@pytest.mark.parametrize("where", [pytest.param("", marks=pytest.mark.slow), "raises", "metric"])
def test_evaluation_is_compared_as_far_as_it_goes(where):
    settings = settings_of(where, evaluate=metric)
    assert settings.accepted == (where != "metric")
    if where == "metric":
        assert "the metric of evaluate() is" in settings.verdict.reason
    else:
        assert "outputs, loss, gradient, buffers and evaluation of 5" in settings.verdict.reason
        assert settings.verdict.not_covered == ()


def test_an_evaluation_leaves_the_models_state_and_runs_as_in_evaluation():
    task = Task(name="task.py", build_model=lambda: noisy(normalised=True), build_data=samples)
    batch = next(iter(samples(8)))
    trainee = KerasTrainee(task, Recipe(batch_size=8), 0, batch, "cpu")
    before = trainee.take_state()
    first, again = (trainee.evaluate_batch(batch, 0) for _ in range(2))
    trained = trainee.observe([(batch, 0)])
    assert first.error is None
    assert first.value == again.value != trained.loss
    exact = trainee.model.predict(batch[0], verbose=0)
    np.testing.assert_allclose(first.outputs[0].matrices[0], exact, rtol=1e-5)
    for old, new in zip(before, trainee.take_state(), strict=True):
        np.testing.assert_array_equal(old, new)
    trainee.close()


def test_a_bfloat16_step_has_the_noise_of_the_float32_step():
    traced = tracer(noisy, samples)
    traced.reference(batch_size=8, steps=2, checkpoints=(0, 1))
    for point in traced.compare_steps(recipe=Recipe(Policy.MIXED_BFLOAT16, batch_size=8)):
        assert point.loss == pytest.approx(point.reference, rel=0.03)
        assert point.gradient_error < 0.1
