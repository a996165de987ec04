"""A loss summed over very much: at the usual scale the first twenty steps overflow."""

from __future__ import annotations

import keras
from keras import ops
from parts import batches, normal, regression

TRUTH = {"mixed_bfloat16": "healthy", "mixed_float16": "healthy"}


def loss(y, p):
    return ops.mean((y - p) ** 2) * 2.0**20


def build_model():
    inputs = keras.Input((8,))
    x = keras.layers.Dense(16, activation="relu")(inputs)
    return regression(inputs, keras.layers.Dense(1)(x), loss=loss)


def build_data(batch_size):
    def make(random, n):
        x = normal(random, n, 8)
        return x, x[:, :1] + x[:, 1:2]

    return batches(batch_size, make)
