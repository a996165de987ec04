"""A VAE with a layer that samples and adds its divergence in 16 bits: healthy."""

from __future__ import annotations

import keras
import numpy as np
from field_parts_keras import batches, compiled, fixed, in_float32, normal, perceptron
from keras import ops

TRUTH_STEPS = 300


class Sampling(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator()

    def call(self, moments):
        mean, log_variance = ops.split(moments, 2, axis=-1)
        terms = ops.square(mean) + ops.exp(log_variance) - 1 - log_variance
        divergence = ops.mean(ops.sum(terms, axis=-1)) / 2
        self.add_loss(ops.cast(0.1 * divergence, "float32"))
        noise = keras.random.normal(ops.shape(mean), dtype=mean.dtype, seed=self.seeds)
        return mean + ops.exp(log_variance / 2) * noise


def summed(images, outputs):
    return ops.sum(ops.square(images - outputs), axis=-1)


def build_model():
    inputs = keras.Input((32,))
    code = Sampling()(perceptron(64, 8, "relu")(inputs))
    outputs = in_float32(perceptron(64, 32, "relu")(code))
    return compiled(keras.Model(inputs, outputs), 2e-3, summed)


def build_data(batch_size):
    def make(random):
        x = np.tanh(normal(random, batch_size, 4) @ fixed(4, 32))
        return x, x

    return batches(make)
