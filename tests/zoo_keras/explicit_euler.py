"""Small steps of an explicit Euler scheme: in 16 bits they are below half a digit. Silent."""

from __future__ import annotations

import keras
import numpy as np
from parts import batches, normal, regression

TRUTH = {"mixed_bfloat16": "broken", "mixed_float16": "broken"}
STEPS, SIZE = 60, 0.0015


class Decay(keras.layers.Layer):
    """How far each start decays at its own rate."""

    def call(self, x):
        start, rate = x[:, :1], x[:, 1:]
        state = start
        for _ in range(STEPS):
            state = state - SIZE * rate * state
        return (state - start) * 10.0


def build_model():
    inputs = keras.Input((2,))
    x = keras.layers.Dense(16, activation="relu")(Decay()(inputs))
    return regression(inputs, keras.layers.Dense(1)(x))


def build_data(batch_size):
    def make(random, n):
        start, rate = normal(random, n, 1), random.uniform(0.5, 1.0, (n, 1)).astype("float32")
        return np.concatenate([start, rate], axis=1), 10 * start * (np.exp(-0.09 * rate) - 1)

    return batches(batch_size, make)
