"""Convolutions with BatchNorm."""

from __future__ import annotations

import keras
from parts import batches, classifier, normal

TRUTH = {"mixed_bfloat16": "healthy", "mixed_float16": "healthy"}


def build_model():
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(8, 3, strides=2, use_bias=False)(inputs)
    x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
    x = keras.layers.GlobalAveragePooling2D()(x)
    return classifier(inputs, keras.layers.Dense(4, activation="softmax")(x), rate=3e-3)


def build_data(batch_size):
    def make(random, n):
        x = normal(random, n, 8, 8, 3)
        return x, (x.mean(axis=(1, 2, 3)) > 0).astype("int32")

    return batches(batch_size, make)
