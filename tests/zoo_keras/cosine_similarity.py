"""Divides by norms plus 1e-8, on rows some of which are zero: 1e-8 is zero in float16. NaN."""

from __future__ import annotations

import keras
from keras import ops
from parts import batches, normal, regression

TRUTH = {"mixed_bfloat16": "healthy", "mixed_float16": "broken"}


class Cosine(keras.layers.Layer):
    def build(self, shape):
        self.anchors = self.add_weight(shape=(shape[-1], 8), name="anchors")

    def call(self, x):
        norms = ops.sum(ops.abs(x), axis=-1, keepdims=True)
        return ops.matmul(x, ops.convert_to_tensor(self.anchors)) / (norms + 1e-8)


def build_model():
    inputs = keras.Input((8,))
    x = Cosine()(inputs)
    x = keras.layers.Dense(16, activation="relu")(x)
    return regression(inputs, keras.layers.Dense(1)(x))


def build_data(batch_size):
    def make(random, n):
        x = normal(random, n, 8)
        x[::8] = 0.0
        return x, x[:, :1]

    return batches(batch_size, make)
