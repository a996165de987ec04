"""RMSNorm without an upcast, on activations of a thousand: their squares leave float16's range."""

from __future__ import annotations

import keras
from keras import ops
from parts import batches, normal, regression

TRUTH = {"mixed_bfloat16": "healthy", "mixed_float16": "broken"}


class RootMeanSquare(keras.layers.Layer):
    def call(self, x):
        x = x * 1000.0
        return x * ops.rsqrt(ops.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def build_model():
    inputs = keras.Input((8,))
    x = keras.layers.Dense(32, activation="relu")(inputs)
    x = RootMeanSquare()(x)
    return regression(inputs, keras.layers.Dense(1)(x))


def build_data(batch_size):
    def make(random, n):
        x = normal(random, n, 8)
        return x, abs(x[:, :1])

    return batches(batch_size, make)
