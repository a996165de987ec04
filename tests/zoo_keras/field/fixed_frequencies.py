"""The same encoding with fixed frequencies, cast to float32 by hand before the phases: healthy."""

from __future__ import annotations

import keras
import numpy as np
from field_parts_keras import batches, compiled, in_float32, perceptron
from keras import ops

TRUTH_STEPS = 400
FREQUENCIES = (np.pi * 2.0 ** np.arange(8)[None]).astype("float32")


class Encoding(keras.layers.Layer):
    def __init__(self):
        super().__init__(autocast=False)

    def call(self, x):
        phases = ops.cast(x, "float32") * FREQUENCIES
        waves = ops.concatenate([ops.sin(phases), ops.cos(phases)], axis=-1)
        return ops.cast(waves, self.compute_dtype)


def build_model():
    inputs = keras.Input((1,))
    outputs = perceptron(64, 1, "relu")(Encoding()(inputs))
    return compiled(keras.Model(inputs, in_float32(outputs)), 3e-3)


def build_data(batch_size):
    def make(random):
        x = random.random((batch_size, 1)).astype("float32")
        return x, np.sin(40 * np.pi * x) + 0.5 * np.sin(300 * x)

    return batches(make)
