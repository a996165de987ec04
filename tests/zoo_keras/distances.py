"""Distances between far points that lie close together: what is left is rounding. Silent."""

from __future__ import annotations

import keras
from keras import ops
from parts import batches, normal, regression

TRUTH = {"mixed_bfloat16": "broken", "mixed_float16": "broken"}


class Distances(keras.layers.Layer):
    def call(self, x):
        first, second = x[:, :4], x[:, 4:]
        product = ops.sum(first * second, axis=-1, keepdims=True)
        squares = ops.sum(first * first + second * second, axis=-1, keepdims=True)
        return squares - 2.0 * product


def build_model():
    inputs = keras.Input((8,))
    x = Distances()(inputs)
    x = keras.layers.Dense(16, activation="relu")(x)
    return regression(inputs, keras.layers.Dense(1)(x))


def build_data(batch_size):
    def make(random, n):
        first, step = normal(random, n, 4) + 50.0, normal(random, n, 4)
        x = keras.ops.concatenate([first, first + step], axis=-1)
        return x, (step**2).sum(axis=-1, keepdims=True)

    return batches(batch_size, make)
