"""Models inside a model, called by its train_step: what they give it is float32."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autoprec import apply_profile
from autoprec.core.recipe import LossScale, Recipe

X = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")


class Coder(keras.Model):
    """Subclassed, so that no graph says what ends it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(width)

    def build(self, shape: Any) -> None:
        self.dense.build(shape)

    def call(self, x: Any) -> Any:
        return {"code": self.dense(x)}


class Autoencoder(keras.Model):
    """Computes its loss from what its parts give, with constants of its own in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Coder(4)
        self.decoder = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6)])
        self.seen: list[Any] = []

    def build(self, shape: Any) -> None:
        self.encoder.build(shape)

    def call(self, x: Any) -> Any:
        code = self.encoder(x)["code"]
        self.seen.append(code.dtype)
        return self.decoder(code)

    def train_step(self, x: Any) -> Any:
        with tf.GradientTape() as tape:
            code = self.encoder(x)["code"]
            error = self.decoder(code) - x
            loss = tf.reduce_mean(error**2) + 0.1 * tf.reduce_mean(code * tf.ones((8, 4)))
            scaled = self.optimizer.scale_loss(loss)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, weights), weights)
        return {"error": loss}


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_parts_that_a_train_step_calls_give_it_float32(policy: str) -> None:
    model = Autoencoder()
    model.build((8, 6))
    model.compile(keras.optimizers.SGD(0.1))
    scale = LossScale(initial=64.0) if policy == "mixed_float16" else None
    with apply_profile(Recipe(policy, batch_size=8, loss_scale=scale), model=model) as precision:
        losses = model.fit(X, batch_size=8, epochs=4, verbose=0).history["error"]
        assert losses[-1] < losses[0]
        assert (precision.steps, precision.skipped) == (4, 0)
        assert model.decoder.predict(X[:, :4], verbose=0).dtype == "float32"


def test_within_the_models_call_they_stay_in_16_bits() -> None:
    model = Autoencoder()
    model.build((8, 6))
    with apply_profile(Recipe("mixed_bfloat16", batch_size=8), model=model):
        assert model(X).dtype == "float32"
    assert {keras.backend.standardize_dtype(dtype) for dtype in model.seen} == {"bfloat16"}
    assert model.encoder(X)["code"].dtype == "float32"
