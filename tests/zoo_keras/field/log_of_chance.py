"""The log of a probability inside the model, a few labels wrong: it overflows late in float16."""

from __future__ import annotations

import keras
import numpy as np
from field_parts_keras import batches, fixed, normal, perceptron
from keras import ops

TRUTH_STEPS = 300


class Surprise(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.body = perceptron(64, 6, "relu")

    def build(self, x_shape, label_shape):
        self.body.build(x_shape)

    def call(self, x, label):
        chances = ops.softmax(self.body(x))
        chance = ops.take_along_axis(chances, label, axis=-1)
        self.add_loss(ops.cast(-ops.mean(ops.log(chance)), "float32"))
        return chances


def build_model():
    inputs, label = keras.Input((16,)), keras.Input((1,), dtype="int32")
    model = keras.Model([inputs, label], Surprise()(inputs, label))
    model.compile(keras.optimizers.Adam(4e-3))
    return model


def build_data(batch_size):
    def make(random):
        x = normal(random, batch_size, 16)
        x[:, :6] *= 6
        label = (x @ fixed(16, 6)).argmax(-1)
        wrong = random.random(batch_size) < 0.03
        label = np.where(wrong, random.integers(0, 6, batch_size), label)
        return ((x, label[:, None].astype("int32")),)

    return batches(make)
