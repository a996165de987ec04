"""An encoding whose weights are frequencies up to 2^7 pi: their phases round in 16 bits."""

from __future__ import annotations

import keras
import numpy as np
from field_parts_keras import batches, compiled, in_float32, perceptron
from keras import ops

TRUTH_STEPS = 400


def octaves(shape, dtype=None):
    return ops.convert_to_tensor(np.pi * 2.0 ** np.arange(shape[-1])[None], dtype=dtype)


class Encoding(keras.layers.Layer):
    def build(self, shape):
        self.frequencies = self.add_weight(shape=(1, 8), initializer=octaves)

    def call(self, x):
        phases = x * self.frequencies
        return ops.concatenate([ops.sin(phases), ops.cos(phases)], axis=-1)


def build_model():
    inputs = keras.Input((1,))
    outputs = perceptron(64, 1, "relu")(Encoding()(inputs))
    return compiled(keras.Model(inputs, in_float32(outputs)), 3e-3)


def build_data(batch_size):
    def make(random):
        x = random.random((batch_size, 1)).astype("float32")
        return x, np.sin(40 * np.pi * x) + 0.5 * np.sin(300 * x)

    return batches(make)
