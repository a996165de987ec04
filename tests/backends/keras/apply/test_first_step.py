"""The first step under a recipe is traced once, and builds the optimizer that Keras would."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from autoprec import apply_profile
from autoprec.core.recipe import LossScale, Recipe

FLOAT16 = Recipe("mixed_float16", batch_size=4, loss_scale=LossScale(initial=64.0))
RECIPES = {
    "float32": Recipe(batch_size=4),
    "bfloat16": Recipe("mixed_bfloat16", batch_size=4),
    "float16": FLOAT16,
    "accumulated": Recipe("mixed_bfloat16", batch_size=4, accumulation_steps=2),
}
X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
Y = X[:, :3] ** 2


class Traced(keras.layers.Layer):
    """Counts how often Python runs it."""

    calls = 0

    def call(self, x):
        self.calls += 1
        return x


class PartTrained(keras.Model):
    """Its step gives the optimizer a part of the weights."""

    def train_step(self, given):
        x, y = given
        weights = self.layers[-1].trainable_variables
        with tf.GradientTape() as tape:
            loss = self.optimizer.scale_loss(self.compute_loss(y=y, y_pred=self(x)))
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


def net(kind=keras.Model):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((4,))
    body = keras.layers.Dense(5, name="body")(inputs)
    outputs = keras.layers.Dense(3, name="head")(Traced(name="traced")(body))
    model = kind(inputs, outputs)
    model.get_layer("traced").calls = 0
    averaged = kind is keras.Model
    model.compile(keras.optimizers.Adam(0.1, use_ema=averaged, name="given"), "mse")
    return model


def fit(model, **more):
    model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0, **more)


def optimizer_paths(model):
    kept = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return [(v.path, tuple(v.shape)) for v in kept.variables]


@pytest.mark.parametrize("name", RECIPES)
def test_it_is_traced_once_with_the_results_of_an_optimizer_built_by_hand(name):
    model, by_hand, plain = net(), net(), net()
    by_hand.optimizer.build(by_hand.trainable_variables)
    fit(plain)
    for each in (model, by_hand):
        with apply_profile(RECIPES[name], model=each) as precision:
            fit(each)
            assert precision.steps == 4 // RECIPES[name].accumulation_steps
        assert each.get_layer("traced").calls == 1
    for ours, theirs in zip(model.weights, by_hand.weights, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert optimizer_paths(model) == optimizer_paths(plain)


def test_until_then_nothing_is_built_and_layers_may_be_frozen_or_not():
    model = net()
    model.get_layer("body").trainable = False
    with apply_profile(FLOAT16, model=model):
        assert not model.optimizer.built
    assert not model.optimizer.built

    class Unfreeze(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.model.get_layer("body").trainable = True

    before = model.get_layer("body").kernel.numpy()
    with apply_profile(FLOAT16, model=model):
        fit(model, callbacks=[Unfreeze()])
    assert not np.array_equal(before, model.get_layer("body").kernel.numpy())


def test_a_step_of_ones_own_builds_the_optimizer_with_what_it_trains():
    model = net(PartTrained)
    with apply_profile(FLOAT16, model=model):
        fit(model)
    names = [path for path, _ in optimizer_paths(model) if "momentum" in path]
    assert names
    assert all("head" in name for name in names)


def test_a_model_that_is_not_built_is_built_by_its_first_step():
    model = keras.Sequential([keras.layers.Dense(5), keras.layers.Dense(3)])
    model.compile("adam", "mse")
    with apply_profile(FLOAT16, model=model) as precision:
        fit(model)
        assert precision.steps == 4
