"""Sinusoids of positions up to 5000: 16 bits cannot hold the positions apart. Silent."""

from __future__ import annotations

import keras
import numpy as np
from keras import ops
from parts import batches, regression

TRUTH = {"mixed_bfloat16": "broken", "mixed_float16": "broken"}


class Sinusoids(keras.layers.Layer):
    def call(self, positions):
        frequencies = ops.cast(ops.exp(-0.5 * ops.arange(8.0)), positions.dtype)
        angles = positions * frequencies
        return ops.concatenate([ops.sin(angles), ops.cos(angles)], axis=-1)


def build_model():
    inputs = keras.Input((1,))
    x = Sinusoids()(inputs)
    x = keras.layers.Dense(32, activation="relu")(x)
    return regression(inputs, keras.layers.Dense(1)(x))


def build_data(batch_size):
    def make(random, n):
        positions = random.integers(0, 5000, (n, 1)).astype("float32")
        return positions, np.sin(positions) + np.cos(0.6 * positions)

    return batches(batch_size, make)
