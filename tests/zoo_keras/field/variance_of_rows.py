"""A layer normalisation of its own by E[x^2] - E[x]^2, on rows whose mean is a few deviations."""

from __future__ import annotations

import keras
from field_parts_keras import batches, compiled, in_float32, normal, smooth
from keras import ops

TRUTH_STEPS = 400


class OwnNorm(keras.layers.Layer):
    def call(self, x):
        mean = ops.mean(x, axis=-1, keepdims=True)
        variance = ops.mean(ops.square(x), axis=-1, keepdims=True) - ops.square(mean)
        return (x - mean) * ops.rsqrt(ops.maximum(variance, 0) + 1e-3)


def build_model():
    inputs = keras.Input((8,))
    x = keras.layers.Dense(32, activation="relu", bias_initializer="ones")(inputs)
    x = keras.layers.Dense(64, activation="tanh")(OwnNorm()(x + 6.0))
    outputs = in_float32(keras.layers.Dense(1)(x))
    return compiled(keras.Model(inputs, outputs), 3e-3)


def build_data(batch_size):
    def make(random):
        x = normal(random, batch_size, 8)
        return x, smooth(x)

    return batches(make)
