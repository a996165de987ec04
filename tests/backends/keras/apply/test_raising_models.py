"""A model whose own code does not compute in 16 bits says which layer, and what helps."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autoprec import apply_profile
from autoprec.core.recipe import LossScale, Recipe

layers = keras.layers
BFLOAT16 = Recipe("mixed_bfloat16", batch_size=4)
FLOAT16 = Recipe("mixed_float16", batch_size=4, loss_scale=LossScale(initial=64.0))
X = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")


class Own(keras.Model):
    """Adds a variable of its own to what a layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = layers.Dense(8), layers.Dense(1)
        self.shift = tf.Variable(tf.ones((8,)))

    def call(self, x: Any) -> Any:
        return self.head(self.hidden(x) + self.shift)


class Shift(layers.Layer):
    def call(self, x: Any) -> Any:
        return tf.where(x > 0, x, tf.zeros_like(x, dtype=tf.float32))


class Nested(keras.Model):
    """Holds a model that holds the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = keras.Sequential([layers.Dense(8), Shift(name="shifting")], name="body")
        self.head = layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.head(self.body(x))


def by_lambda() -> Any:
    shift = layers.Lambda(lambda x: x - tf.ones((8,)), output_shape=(8,), name="minus")
    return keras.Sequential([keras.Input((6,)), layers.Dense(8), shift, layers.Dense(1)])


class OwnStep(keras.Model):
    """Computes in its train_step, with its layers and not by its call."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = layers.Dense(8), layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.head(self.hidden(x))

    def train_step(self, given: Any) -> Any:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(given)
        with tf.GradientTape() as tape:
            out = self.head(self.hidden(x) * tf.ones((8,)))
            loss = tf.reduce_mean(tf.square(tf.cast(out, tf.float32) - y))
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


KINDS = {
    "own code": (Own, "", r"own \(Own\)"),
    "nested": (Nested, "body/shifting", r"body/shifting \(Shift\)"),
    "lambda": (by_lambda, "minus", r"minus \(Lambda\)"),
    "train_step": (OwnStep, "", r"own_step \(OwnStep\)"),
}


def fit(model: Any) -> None:
    model.fit(X, X[:, :1], batch_size=4, verbose=0)


def loop(model: Any) -> None:
    with tf.GradientTape():
        model(X, training=True)


@pytest.mark.parametrize("recipe", [BFLOAT16, FLOAT16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("kind", "eager", "train"),
    [
        *((kind, eager, fit) for kind in KINDS for eager in (False, True)),
        *((kind, False, loop) for kind in ("own code", "nested", "lambda")),
    ],
)
def test_the_layer_is_named_and_what_is_said_helps(
    kind: str, eager: bool, train: Any, recipe: Recipe
) -> None:
    build, path, named = KINDS[kind]
    model = build()
    model(X)
    model.compile("sgd", "mse", run_eagerly=eager)
    said = rf"{named} does not compute in {recipe.policy}: .*float32_modules: \['{path}'\]"
    with (
        apply_profile(recipe, model=model),
        pytest.raises((TypeError, tf.errors.InvalidArgumentError), match=said) as told,
    ):
        train(model)
    assert str(told.value).count("float32_modules") == 1
    kept = Recipe(
        recipe.policy, batch_size=4, float32_modules=(path,), loss_scale=recipe.loss_scale
    )
    with apply_profile(kept, model=model):
        train(model)


def test_what_has_nothing_to_do_with_16_bits_is_raised_as_it_is() -> None:
    class Failing(Own):
        def call(self, x: Any) -> Any:
            raise ValueError("half of the data is missing" if x is None else "no such table")

    model = Failing()
    with (
        apply_profile(BFLOAT16, model=model),
        pytest.raises(ValueError, match="no such table") as told,
    ):
        model(X)
    assert "float32_modules" not in str(told.value)
