"""A softmax router that sends every token to two of six experts: healthy though ties may turn."""

from __future__ import annotations

import keras
from field_parts_keras import batches, compiled, in_float32, normal, smooth
from keras import ops

TRUTH_STEPS = 300


class Experts(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.router = keras.layers.Dense(6)
        self.experts = [keras.layers.Dense(32, activation="gelu") for _ in range(6)]

    def build(self, shape):
        self.router.build(shape)
        for expert in self.experts:
            expert.build(shape)

    def call(self, x):
        chances = ops.softmax(self.router(x))
        best, index = ops.top_k(chances, 2)
        chosen = ops.sum(ops.one_hot(index, 6, dtype=chances.dtype), axis=-2)
        weights = chosen * chances / ops.sum(best, axis=-1, keepdims=True)
        outputs = ops.stack([expert(x) for expert in self.experts], axis=-1)
        return ops.sum(outputs * weights[:, None], axis=-1)


def build_model():
    inputs = keras.Input((16,))
    x = keras.layers.Dense(32, activation="gelu")(inputs)
    x = x + Experts()(keras.layers.LayerNormalization()(x))
    outputs = in_float32(keras.layers.Dense(1)(x))
    return compiled(keras.Model(inputs, outputs), 2e-3)


def build_data(batch_size):
    def make(random):
        x = normal(random, batch_size, 16)
        return x, smooth(x) + 0.1 * normal(random, batch_size, 1)

    return batches(make)
