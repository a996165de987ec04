"""An LSTM over short sequences."""

from __future__ import annotations

import keras
from parts import batches, normal, regression

TRUTH = {"mixed_bfloat16": "healthy", "mixed_float16": "healthy"}


def build_model():
    inputs = keras.Input((5, 4))
    x = keras.layers.LSTM(8)(inputs)
    return regression(inputs, keras.layers.Dense(1)(x), rate=3e-3)


def build_data(batch_size):
    def make(random, n):
        x = normal(random, n, 5, 4)
        return x, x[:, :, :1].mean(axis=1)

    return batches(batch_size, make)
