"""What a model puts out is compared as well, whoever calls it and whatever holds its outputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autoprec.backends.keras.train import recorded_outputs
from autoprec.backends.keras.train.recorded_outputs import (
    Outputs,
    observing_function,
    outputs_error,
)
from autoprec.core.recipe import Recipe
from autoprec.tuning.proof.recipe_proof import Proof
from tests.backends.keras.keras_models import Pair, data, softmax_net
from tests.backends.keras.trace.test_tracer import tracer

layers = keras.layers
SPLIT = Recipe(batch_size=4, accumulation_steps=2)
COMPILED = Recipe(batch_size=8, compile=True)
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Centred(layers.Layer):
    """Takes the batch's mean from its inputs; without weights, and behind no loss."""

    def call(self, x):
        return x - keras.ops.mean(x, axis=0, keepdims=True)


def with_a_map(last):
    """A functional model whose second output no loss reads."""
    inputs = layers.Input((8,))
    hidden = layers.Dense(16, "relu")(inputs)
    model = keras.Model(inputs, {"classes": layers.Dense(4)(hidden), "map": last()(hidden)})
    model.compile("sgd", {"classes": CROSS_ENTROPY, "map": None})
    return model


def labelled(batch_size):
    draws = np.random.default_rng(0)
    for _ in range(40):
        x = draws.normal(size=(batch_size, 8)).astype("float32")
        yield x, {"classes": draws.integers(0, 4, batch_size)}


def test_an_output_that_no_loss_reads_is_compared():
    def rejected(last):
        return Proof(tracer(lambda: with_a_map(last), labelled), steps=8).prove(SPLIT)

    assert rejected(layers.ReLU).accepted
    verdict = rejected(Centred)
    assert verdict.verdict == "rejected"
    assert "its outputs are off by" in verdict.reason


@dataclasses.dataclass
class Parts:
    classes: Any
    sequence: Any


class Structured(keras.Model):
    """Gives a dataclass, and takes the loss from it."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = layers.Dense(8), layers.Dense(4)
        self.recurrent = layers.SimpleRNN(3, return_sequences=True)

    def call(self, x):
        hidden = self.hidden(x)
        return Parts(self.head(hidden), self.recurrent(keras.ops.expand_dims(hidden, 1)))

    def train_step(self, given):
        x, y = given
        with tf.GradientTape() as tape:
            found = self(x, training=True)
            loss = CROSS_ENTROPY(y, found.classes) + keras.ops.mean(found.sequence**2)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def structured():
    model = Structured()
    model.compile("sgd")
    return model


def gan():
    model = Pair()
    model.compile(keras.optimizers.SGD(0.05), keras.optimizers.SGD(0.01))
    return model


def real(batch_size):
    draws = np.random.default_rng(0)
    for _ in range(40):
        yield draws.normal(size=(batch_size, 8)).astype("float32")


@pytest.mark.parametrize(
    ("model", "given", "recipe"),
    [
        (structured, lambda _: data(64), SPLIT),
        pytest.param(structured, lambda _: data(64), COMPILED, marks=pytest.mark.slow),
        (gan, real, SPLIT),
        pytest.param(gan, real, COMPILED, marks=pytest.mark.release),  # 10 s of XLA
    ],
    ids=["a dataclass", "a dataclass, compiled", "parts on real and made samples", "and compiled"],
)
def test_outputs_that_are_alike_are_found_alike(model, given, recipe):
    found = tracer(model, given).compare_settings(recipe=recipe)
    assert found.outputs_seen
    assert max(point.outputs_error for point in found.points) < 1e-5
    assert all(0 < point.outputs_error < 1e-4 for point in found.noise)


class Looping(keras.Model):
    """Calls a layer in a loop, in a branch and in a function of its own, and shows one output."""

    def __init__(self):
        super().__init__()
        self.step, self.head = layers.Dense(8), layers.Dense(4)
        self.traced = tf.function(self.step.__call__)

    def train_step(self, given):
        x, y = given
        with tf.GradientTape() as tape:
            hidden = keras.ops.fori_loop(0, 2, lambda _, h: self.step(h), x)
            hidden = keras.ops.cond(keras.ops.sum(x) > 0, lambda: self.step(hidden), lambda: hidden)
            loss = CROSS_ENTROPY(y, self.head(self.traced(hidden)))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def test_what_is_computed_inside_of_loops_and_functions_stays_there():
    model = Looping()
    for layer in (model.step, model.head):
        layer.build((None, 8))
    model.compile("sgd")
    x, y = data(8)
    _, _, outputs = observing_function(model)((tf.constant(x), tf.constant(y)), 1.0)
    assert [tuple(each.shape) for each in outputs] == [(8, 4)]
    assert "call" not in vars(model.head)


def test_of_a_large_output_a_part_keeps_the_columns_of_the_whole(monkeypatch):
    monkeypatch.setattr(recorded_outputs, "MAX_ELEMENTS", 3)
    model = softmax_net(classes=10)
    observe = observing_function(model)
    x, y = (tf.constant(each) for each in data(8))
    (whole,) = observe((x, y), 1.0)[2]
    (half,) = observe((x[:4], y[:4]), 1.0)[2]
    assert whole.shape == (8, 3)
    np.testing.assert_allclose(whole[:4], half, rtol=1e-5)


def parts(*matrices, samples=2):
    return [Outputs([np.asarray(each, "float32")], samples) for each in matrices]


WHOLE = parts([[1, 0], [2, 1], [3, 2], [4, 5]], samples=4)


@pytest.mark.parametrize(
    ("found", "error"),
    [
        (parts([[1, 0], [2, 1]], [[3, 2], [4, 5]]), 0.0),
        (parts([[1, 0], [3, 2]], [[2, 1], [4, 5]], samples=1), 0.0),  # two batches, put together
        (parts([[1, 0], [3, 2]], [[2, 1], [4, 5]]), pytest.approx(2 / 19**0.5)),
        (parts([[1, 0]], [[3, 2]]), 0.0),  # no row for every sample: not compared
        (parts([[1, 0], [2, 1], [3, 2], [4, np.nan]], samples=4), None),
        (parts([[1], [2], [3], [4]], samples=4), None),
        ([Outputs([], 4)], None),
        ([], 0.0),
    ],
)
def test_outputs_are_put_together_and_compared(found, error):
    assert outputs_error(found, WHOLE) == error
