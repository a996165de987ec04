"""Keras: an exception tells which layers it was raised in, and islands repair what raises."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from autoprec.backends.keras.backend import KerasBackend
from autoprec.backends.protocol import Task
from autoprec.core.recipe import Recipe
from autoprec.tuning.proof.recipe_proof import Proof

pytestmark = pytest.mark.keras


class Mixing(keras.layers.Layer):
    """Adds a float32 constant by TensorFlow's own operator, which casts nothing."""

    def call(self, x):
        import tensorflow as tf

        return tf.add(x, tf.fill(tf.shape(x), tf.constant(0.5, tf.float32)))


class Stack(keras.Model):
    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(16, activation="relu")
        self.shift = [Mixing() for _ in range(3)]
        self.last = keras.layers.Dense(1)

    def call(self, x):
        x = self.first(x)
        for layer in self.shift:
            x = layer(x)
        return self.last(x)


def functional():
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(16, activation="relu")(inputs)
    return keras.Model(inputs, keras.layers.Dense(1)(Mixing()(hidden)))


class Scatter(keras.layers.Layer):
    """Adds rows into a float32 table by TensorFlow's own operator."""

    def build(self, shape):
        kept = {"initializer": "zeros", "trainable": False, "autocast": False}
        self.table = self.add_weight(shape=(4, shape[-1]), name="table", **kept)

    def call(self, x):
        import tensorflow as tf

        table = tf.tensor_scatter_nd_add(self.table.value, [[0]], x[:1])
        return x + keras.ops.cast(keras.ops.sum(table), x.dtype)


def scattering():
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(16, activation="relu")(inputs)
    return keras.Model(inputs, keras.layers.Dense(1)(Scatter()(hidden)))


def task_of(build):
    def build_model():
        model = build()
        model.compile("adam", "mse")
        return model

    def build_data(batch_size):
        draws = np.random.default_rng(0)
        for _ in range(40):
            x = draws.normal(size=(batch_size, 4)).astype("float32")
            yield x, x[:, :1]

    return Task("model.py", build_model=build_model, build_data=build_data)


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (Stack, {"mixing", "mixing_1", "mixing_2"}),
        (functional, {"mixing"}),
        pytest.param(scattering, {"scatter"}, marks=pytest.mark.slow),
    ],
)
def test_the_layers_that_raise_are_kept_in_float32_and_no_others(build, expected):
    backend, task = KerasBackend(), task_of(build)
    recipe = Recipe("mixed_bfloat16", batch_size=8)
    facts = backend.describe(task, device="cpu", seed=0, batch_size=8, report=lambda *_: None)
    proof = Proof(backend.tracer(task, device="cpu", seed=0, report=lambda *_: None), steps=8)
    reason = proof.prove(recipe).reason
    assert "raises under it: " in reason
    assert "Exception encountered" not in reason
    found = proof.find_islands(recipe, facts.units)
    assert found.recipe is not None, found.reason
    assert set(found.recipe.float32_modules) == expected
    assert found.trials <= 4, "it follows the exceptions"
