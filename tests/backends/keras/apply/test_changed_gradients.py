"""A script that changes scaled gradients is told so at its first step; a scaled limit is right."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from autoprec import apply_profile
from autoprec.core.recipe import LossScale, Recipe
from autoprec.errors import AutoprecWarning

layers = keras.layers
X = np.random.default_rng(0).normal(size=(8, 8)).astype("float32")
Y = 5 * X[:, :1]
FLOAT16 = Recipe("mixed_float16", batch_size=8, loss_scale=LossScale(initial=1024.0))
TOLD = "other gradients than the tape returned"


def net():
    keras.utils.set_random_seed(0)
    return keras.Sequential([layers.Input((8,)), layers.Dense(8, "tanh"), layers.Dense(1)])


def clipped(gradients, limit):
    return tf.clip_by_global_norm(gradients, limit)[0]


def clipped_each(gradients, limit):
    return [tf.clip_by_norm(gradient, limit) for gradient in gradients]


def decayed(gradients, limit):
    return [gradient + 0.01 * limit * tf.sign(gradient) for gradient in gradients]


def trained(recipe, change, run, limit=lambda scale: 1.0):
    """Train three steps of a loop; return its losses."""
    model, optimizer = net(), keras.optimizers.SGD(0.1)
    loss_fn = keras.losses.MeanSquaredError()
    with apply_profile(recipe, model=model, optimizer=optimizer) as precision:

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_fn(y, model(x, training=True))
                scaled = precision.scale_loss(loss)
            gradients = tape.gradient(scaled, model.trainable_variables)
            gradients = change(gradients, limit(precision.scale_loss))
            precision.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        step = run(step)
        return [float(step(X, Y)) for _ in range(3)]


WAYS = {"function": tf.function, "eager": lambda step: step}


@pytest.mark.parametrize("change", [clipped, clipped_each, decayed])
@pytest.mark.parametrize("run", WAYS.values(), ids=WAYS)
def test_changes_under_a_loss_scale_are_told_and_right_with_a_scaled_limit(change, run):
    own = tf.GradientTape.gradient
    exact = trained(Recipe("float32", batch_size=8), change, run)
    with pytest.warns(AutoprecWarning, match=TOLD) as told:
        trained(FLOAT16, change, run)
    assert sum(TOLD in str(each.message) for each in told) == 1
    found = trained(FLOAT16, change, run, limit=lambda scale: scale(1.0))
    assert found == pytest.approx(exact, rel=0.02)
    assert found[-1] < found[0]
    assert tf.GradientTape.gradient is own


class Clipping(keras.Model):
    """Clips in its train_step, scaled gradients or by a scaled limit."""

    def __init__(self, scales):
        super().__init__()
        self.network, self.scales = net(), scales

    def call(self, x):
        return self.network(x)

    def train_step(self, given):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(given)
        weights = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
            scaled = self.optimizer.scale_loss(loss)
        limit = self.optimizer.scale_loss(1.0) if self.scales else 1.0
        self.optimizer.apply(clipped(tape.gradient(scaled, weights), limit), weights)
        return {"loss": loss}


def test_a_train_step_that_clips_is_told_so_too():
    model = Clipping(scales=False)
    model.compile("sgd", "mse")
    with apply_profile(FLOAT16, model=model):
        with pytest.warns(AutoprecWarning, match=TOLD):
            model.train_on_batch(X, Y)
        model.fit(X, Y, verbose=0)


def test_gradients_that_another_function_returned_are_taken_as_they_are():
    model, optimizer = net(), keras.optimizers.SGD(0.1)
    with apply_profile(FLOAT16, model=model, optimizer=optimizer) as precision:

        @tf.function
        def gradients():
            with tf.GradientTape() as tape:
                scaled = precision.scale_loss(tf.reduce_mean(tf.square(model(X) - Y)))
            return tape.gradient(scaled, model.trainable_variables)

        for _ in range(2):
            precision.apply_gradients(zip(gradients(), model.trainable_variables, strict=True))
        assert precision.steps == 2
