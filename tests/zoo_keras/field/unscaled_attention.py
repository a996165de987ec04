"""Scores without a division by the root of the width, on unnormalised sums of large inputs."""

from __future__ import annotations

import keras
from field_parts_keras import batches, compiled, in_float32, normal
from keras import ops

TRUTH_STEPS = 300


class Attention(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (keras.layers.Dense(64) for _ in range(3))

    def build(self, shape):
        for layer in (self.query, self.key, self.value):
            layer.build(shape)

    def call(self, x):
        scores = ops.matmul(self.query(x), ops.transpose(self.key(x), (0, 2, 1)))
        return x[..., :64] + ops.matmul(ops.softmax(scores), self.value(x))


def build_model():
    inputs = keras.Input((6, 64))
    x = Attention()(inputs)
    x = keras.layers.GlobalAveragePooling1D()(x)
    outputs = in_float32(keras.layers.Dense(4)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return compiled(keras.Model(inputs, outputs), 2e-3, loss)


def build_data(batch_size):
    def make(random):
        x = 2 * normal(random, batch_size, 6, 64)
        return x, x[:, 0, :4].argmax(-1)

    return batches(make)
