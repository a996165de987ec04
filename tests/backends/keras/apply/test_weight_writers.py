"""Layers that assign their weights: Keras's compute them in float32, a skipped step undoes it."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from autoprec import apply_profile
from autoprec.core.recipe import LossScale, Recipe
from tests.backends.keras.keras_models import data

layers = keras.layers
BFLOAT16 = Recipe("mixed_bfloat16", batch_size=8)
FLOAT16 = Recipe("mixed_float16", batch_size=8, loss_scale=LossScale(initial=64.0))


def functional():
    return keras.Sequential(
        [
            layers.Input((8,)),
            layers.SpectralNormalization(layers.Dense(16, "relu"), name="normalized"),
            layers.Dense(4, "softmax"),
        ]
    )


class MadeLater(keras.Model):
    """Makes its layers when it is built."""

    def build(self, shape):
        self.normalized = layers.SpectralNormalization(layers.Dense(16, "relu"), name="normalized")
        self.head = layers.Dense(4, "softmax")
        self.normalized.build(shape)
        self.head.build((shape[0], 16))

    def call(self, x, training=False):
        return self.head(self.normalized(x, training=training))


@pytest.mark.parametrize("make", [functional, MadeLater])
def test_the_weights_they_assign_are_not_rounded_and_their_products_are(make):
    model = make()
    model.compile("sgd", "sparse_categorical_crossentropy")
    x, y = data(16)
    with apply_profile(BFLOAT16, model=model) as precision:
        model.train_on_batch(x, y)
        (wrapper,) = (
            each
            for each in model._flatten_layers()
            if isinstance(each, layers.SpectralNormalization)
        )
        assert wrapper.layer.compute_dtype == "bfloat16"
        assert precision.report.kept == ("normalized",)
        kernel = wrapper.layer.kernel.numpy()
    rounded = keras.ops.convert_to_numpy(
        keras.ops.cast(keras.ops.cast(kernel, "bfloat16"), "float32")
    )
    assert np.mean(kernel == rounded) < 0.1
    assert wrapper.compute_dtype == wrapper.layer.compute_dtype == "float32"


class Codes(layers.Layer):
    """Moves the codes that are nearest to what it is given, in a weight of its own or a table."""

    def __init__(self, kind):
        super().__init__()
        self.table = layers.Embedding(6, 4) if kind == "table" else None
        self.frozen = kind == "frozen"

    def build(self, shape):
        if self.table is None:
            self.codes = self.add_weight(shape=(6, 4), initializer="normal", name="codes")
            self.trainable = not self.frozen
        else:
            self.table.build((None,))
            self.codes = self.table.embeddings

    def call(self, x, training=False):
        codes, given = (keras.ops.cast(each, "float32") for each in (self.codes, x))
        nearest = keras.ops.argmin(keras.ops.sum((given[:, None] - codes) ** 2, -1), 1)
        if training:
            hot = keras.ops.one_hot(nearest, 6)
            mean = keras.ops.matmul(keras.ops.transpose(hot), given) / 8.0
            moved = keras.ops.where(keras.ops.sum(hot, 0)[:, None] > 0, 0.9 * codes + mean, codes)
            self.codes.assign(keras.ops.stop_gradient(moved))
        return x + keras.ops.cast(keras.ops.take(codes, nearest, axis=0), x.dtype)


@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.parametrize("kind", ["weight", "frozen", "table"])
def test_a_skipped_step_leaves_codes_as_they_were_that_a_layer_assigns(kind, eagerly):
    draws, codes = np.random.default_rng(0), Codes(kind)
    model = keras.Sequential([layers.Input((6,)), layers.Dense(4), codes, layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=eagerly)
    with apply_profile(FLOAT16, model=model) as precision:
        for number in range(4):
            x = draws.normal(size=(8, 6)).astype("float32") * (1e7 if number == 2 else 1.0)
            before = codes.codes.numpy()
            model.train_on_batch(x, x[:, :1] * 1e-3)
            assert np.array_equal(before, codes.codes.numpy()) is (number == 2)
        assert precision.skipped == 1
