"""Masks attention scores with mask * -1e9, which float16 makes 0 * -inf. NaN."""

from __future__ import annotations

import keras
import numpy as np
from keras import ops
from parts import batches, classifier, normal

TRUTH = {"mixed_bfloat16": "healthy", "mixed_float16": "broken"}


class Attend(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.query, self.key = keras.layers.Dense(8), keras.layers.Dense(8)

    def build(self, shape):
        self.query.build(shape)
        self.key.build(shape)

    def call(self, x):
        scores = ops.matmul(self.query(x), ops.transpose(self.key(x), (0, 2, 1)))
        mask = ops.cast(np.triu(np.ones((6, 6)), 1), scores.dtype)
        scores = scores + mask * ops.cast(-1e9, scores.dtype)
        return ops.matmul(ops.softmax(scores), x)


def build_model():
    inputs = keras.Input((6, 8))
    x = keras.layers.Flatten()(Attend()(inputs))
    return classifier(inputs, keras.layers.Dense(4, activation="softmax")(x))


def build_data(batch_size):
    def make(random, n):
        x = normal(random, n, 6, 8)
        return x, x[:, 0, :4].argmax(axis=-1)

    return batches(batch_size, make)
