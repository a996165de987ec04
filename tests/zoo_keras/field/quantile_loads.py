"""Three quantiles of loads of some thousand megawatts by the pinball loss, in their own units."""

from __future__ import annotations

import keras
import numpy as np
from field_parts_keras import batches, compiled, in_float32, normal, perceptron, smooth
from keras import ops

TRUTH_STEPS = 400


class Megawatts(keras.layers.Layer):
    def build(self, shape):
        self.base = self.add_weight(shape=(1,), initializer=keras.initializers.Constant(6000.0))

    def call(self, x):
        return self.base + 400 * x


def pinball(loads, outputs):
    levels = np.array([0.1, 0.5, 0.9], "float32")
    away = loads - outputs
    return ops.mean(ops.maximum(levels * away, (levels - 1) * away), axis=-1)


def build_model():
    inputs = keras.Input((8,))
    loads = Megawatts()(perceptron(64, 3, "relu")(inputs))
    return compiled(keras.Model(inputs, in_float32(loads)), 3e-3, pinball)


def build_data(batch_size):
    def make(random):
        x = normal(random, batch_size, 8)
        return x, 6000 + 400 * smooth(x) + 20 * normal(random, batch_size, 1)

    return batches(make)
