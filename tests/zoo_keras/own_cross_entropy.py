"""Clips p to 1 - 1e-7 and takes log (1 - p) inside a layer: in 16 bits that is log 0. NaN."""

from __future__ import annotations

import keras
from keras import ops
from parts import batches, normal

TRUTH = {"mixed_bfloat16": "broken", "mixed_float16": "broken"}


class OwnCrossEntropy(keras.layers.Layer):
    def call(self, logits, targets):
        p = ops.clip(ops.sigmoid(logits * 8.0), 1e-7, 1 - 1e-7)
        losses = targets * ops.log(p) + (1 - targets) * ops.log(1 - p)
        self.add_loss(-ops.mean(losses))
        return p


def build_model():
    inputs, targets = keras.Input((8,)), keras.Input((1,))
    x = keras.layers.Dense(32, activation="relu")(inputs)
    p = OwnCrossEntropy()(keras.layers.Dense(1)(x), targets)
    model = keras.Model([inputs, targets], keras.layers.Dense(1)(p))
    model.compile(keras.optimizers.Adam(1e-2), loss=lambda y, p: 0.0 * ops.mean(p))
    return model


def build_data(batch_size):
    def make(random, n):
        x = normal(random, n, 8)
        y = (x[:, :1] > 0).astype("float32")
        return (x, y), y

    return batches(batch_size, make)
