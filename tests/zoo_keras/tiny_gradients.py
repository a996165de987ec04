"""A loss averaged over very much: at the usual scale float16 gradients are zero."""

from __future__ import annotations

import keras
from keras import ops
from parts import batches, normal, regression

TRUTH = {"mixed_bfloat16": "healthy", "mixed_float16": "healthy"}


def loss(y, p):
    return ops.mean((y - p) ** 2) * 2.0**-30


def build_model():
    inputs = keras.Input((8,))
    x = keras.layers.Dense(16, activation="relu")(inputs)
    model = regression(inputs, keras.layers.Dense(1)(x), loss=loss)
    model.compile(keras.optimizers.RMSprop(1e-2, epsilon=1e-20), loss)
    return model


def build_data(batch_size):
    def make(random, n):
        x = normal(random, n, 8)
        return x, x[:, :1] + x[:, 1:2]

    return batches(batch_size, make)
