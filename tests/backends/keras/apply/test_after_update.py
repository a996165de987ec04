"""What a step assigns after its update has no trace of a skipped one either."""

from __future__ import annotations

import itertools
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

from autoprec import apply_profile
from autoprec.core.recipe import LossScale, Recipe

layers = keras.layers
RECIPE = Recipe("mixed_float16", batch_size=8, loss_scale=LossScale(initial=64.0))
PLANTED = 2


class Centre(layers.Layer):
    """Moves a centre of what it is given, as self-distillation does after its update."""

    def build(self, shape):
        self.centre = self.add_weight(shape=shape[-1:], trainable=False, initializer="zeros")

    def call(self, x):
        mean = keras.ops.mean(keras.ops.cast(x, "float32"), axis=0)
        self.centre.assign(0.9 * keras.ops.cast(self.centre, "float32") + 0.1 * mean)
        return x


def of_keras(model):
    model.mean = keras.Variable(0.0, trainable=False)
    return lambda loss, hidden: model.mean.assign(0.9 * model.mean + 0.1 * loss)


def of_tensorflow(model):
    model.helper = types.SimpleNamespace(mean=tf.Variable(0.0, trainable=False))
    return lambda loss, hidden: model.helper.mean.assign_add(0.1 * (loss - model.helper.mean))


def of_a_layer(model):
    model.centre = Centre()
    model.centre.build((None, 4))
    return lambda loss, hidden: model.centre(hidden)


def of_two(model):
    """The second is made of what the first has become."""
    model.mean = model.add_weight(shape=(), initializer="zeros", trainable=False)
    model.double = tf.Variable(0.0, trainable=False)

    def move(loss, hidden):
        model.mean.assign(0.9 * model.mean + 0.1 * loss)
        model.double.assign(2.0 * keras.ops.convert_to_tensor(model.mean))

    return move


class Averaged(keras.Model):
    """Trains, then moves an average of its loss or of what it computes in between."""

    def __init__(self, average):
        super().__init__()
        self.hidden, self.head = layers.Dense(4), layers.Dense(1)
        self.move = average(self)

    def call(self, x):
        return self.head(self.hidden(x))

    def train_step(self, given):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(given)
        with tf.GradientTape() as tape:
            hidden = self.hidden(x)
            loss = keras.ops.mean(keras.ops.square(keras.ops.cast(self.head(hidden), y.dtype) - y))
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.move(loss, hidden)
        return {"loss": loss}

    def averages(self):
        found = [getattr(self, name, None) for name in ("mean", "double")]
        found += [getattr(getattr(self, "helper", None), "mean", None)]
        found += [getattr(getattr(self, "centre", None), "centre", None)]
        return [each.numpy() for each in found if each is not None]


def batches(count=5):
    draws = np.random.default_rng(0)
    for number in range(count):
        x = draws.normal(size=(8, 6)).astype("float32")
        if number == PLANTED:
            x[3] = 1e6
        yield x, draws.normal(size=(8, 1)).astype("float32")


def by_train_on_batch(model, optimizer):
    return model.train_on_batch


def by_function(model, optimizer):
    """A function of the script's own, several steps of which it runs in a loop."""
    optimizer.build(model.trainable_variables)

    @tf.function
    def run(x, y):
        for _ in tf.range(1):
            model.train_step((x, y))

    return lambda x, y: run(tf.constant(x), tf.constant(y))


@pytest.mark.parametrize("average", [of_keras, of_tensorflow, of_a_layer, of_two])
@pytest.mark.parametrize(
    ("way", "compiled"),
    [
        (by_train_on_batch, {}),
        (by_train_on_batch, {"run_eagerly": True}),
        (by_train_on_batch, {"jit_compile": True}),
        (by_function, {}),
    ],
    ids=["train_on_batch", "eager", "jit", "function"],
)
def test_an_average_that_is_moved_after_the_update_stays_as_it_was(average, way, compiled):
    model = Averaged(average)
    model(next(batches())[0])
    model.compile("sgd", **compiled)
    seen = [model.averages()]
    with apply_profile(RECIPE, model=model) as precision:
        step = way(model, precision.optimizer)
        for x, y in batches():
            step(x, y)
            seen.append(model.averages())
        assert precision.skipped == 1
    assert seen[0]
    for number, (before, after) in enumerate(itertools.pairwise(seen)):
        for old, new in zip(before, after, strict=True):
            assert np.isfinite(new).all()
            assert np.array_equal(old, new) == (number == PLANTED)


def test_it_does_with_several_steps_in_an_execution():
    model = Averaged(of_keras)
    model(next(batches())[0])
    model.compile("sgd", steps_per_execution=3)
    x, y = (np.concatenate(each) for each in zip(*batches(6), strict=True))
    with apply_profile(RECIPE, model=model) as precision:
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        assert precision.skipped == 1
    assert 0.0 < model.mean.numpy() < np.inf


def test_what_becomes_infinite_without_a_skipped_update_is_the_scripts_own():
    def diverging(model):
        model.mean = keras.Variable(1.0, trainable=False)
        return lambda loss, hidden: model.mean.assign(model.mean / 0.0)

    model = Averaged(diverging)
    model(next(batches())[0])
    model.compile("sgd")
    with apply_profile(RECIPE, model=model) as precision:
        model.train_on_batch(*next(batches()))
        assert precision.skipped == 0
    assert np.isinf(model.mean.numpy())
