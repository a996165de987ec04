"""Layers that assign their weights when they are called compute them in float32."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from autoprec import apply_profile
from autoprec.core.recipe import Recipe
from tests.backends.keras.keras_models import data

layers = keras.layers
BFLOAT16 = Recipe("mixed_bfloat16", batch_size=8)


def functional():
    return keras.Sequential(
        [
            layers.Input((8,)),
            layers.SpectralNormalization(layers.Dense(16, "relu"), name="normalized"),
            layers.Dense(4, "softmax"),
        ]
    )


class MadeLater(keras.Model):
    """Makes its layers when it is built."""

    def build(self, shape):
        self.normalized = layers.SpectralNormalization(layers.Dense(16, "relu"), name="normalized")
        self.head = layers.Dense(4, "softmax")
        self.normalized.build(shape)
        self.head.build((shape[0], 16))

    def call(self, x, training=False):
        return self.head(self.normalized(x, training=training))


@pytest.mark.parametrize("make", [functional, MadeLater])
def test_the_weights_they_assign_are_not_rounded_and_their_products_are(make):
    model = make()
    model.compile("sgd", "sparse_categorical_crossentropy")
    x, y = data(16)
    with apply_profile(BFLOAT16, model=model) as precision:
        model.train_on_batch(x, y)
        (wrapper,) = (
            each
            for each in model._flatten_layers()
            if isinstance(each, layers.SpectralNormalization)
        )
        assert wrapper.layer.compute_dtype == "bfloat16"
        assert precision.report.kept == ("normalized",)
        kernel = wrapper.layer.kernel.numpy()
    rounded = keras.ops.convert_to_numpy(
        keras.ops.cast(keras.ops.cast(kernel, "bfloat16"), "float32")
    )
    assert np.mean(kernel == rounded) < 0.1
    assert wrapper.compute_dtype == wrapper.layer.compute_dtype == "float32"
