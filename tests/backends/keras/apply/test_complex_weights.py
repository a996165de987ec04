"""A model with complex weights trains under a loss scale, is split, and is compared."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from autoprec import apply_profile
from autoprec.backends.keras.backend import KerasBackend
from autoprec.backends.protocol import Task
from autoprec.core.recipe import LossScale, Recipe

FLOAT16 = Recipe("mixed_float16", batch_size=8, loss_scale=LossScale(initial=64.0))


class Turned(keras.layers.Layer):
    """Multiplies by complex weights."""

    def build(self, shape):
        turns = keras.initializers.Constant(1.0)
        self.turns = self.add_weight(shape=shape[-1:], initializer=turns, dtype="complex64")

    def call(self, x):
        exact = keras.ops.cast(x, "float32")
        turned = tf.complex(exact, exact[:, ::-1]) * self.turns
        return keras.ops.cast(tf.math.real(turned) + tf.math.imag(turned), x.dtype)


def build():
    model = keras.Sequential(
        [keras.layers.Input((6,)), keras.layers.Dense(4), Turned(), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def batches(batch_size):
    draws = np.random.default_rng(0)
    for _ in range(8):
        x = draws.normal(size=(batch_size, 6)).astype("float32")
        yield x, x[:, :1] * 0.5


def test_it_trains_under_float16_and_a_step_that_overflows_is_skipped():
    model, plain = build(), build()
    plain.set_weights(model.get_weights())
    given = list(batches(8))
    for x, y in given:
        plain.train_on_batch(x, y)
    turns = model.layers[1].turns
    with apply_profile(FLOAT16, model=model) as precision:
        for x, y in given:
            model.train_on_batch(x, y)
        before = turns.numpy()
        model.train_on_batch(np.full_like(given[0][0], np.inf), given[0][1])
        assert (precision.steps, precision.skipped) == (8, 1)
        (check,) = precision.watched
        assert check.gradient
        assert 0 < check.gradient < 0.02
    np.testing.assert_array_equal(turns.numpy(), before)
    np.testing.assert_allclose(before, plain.layers[1].turns.numpy(), atol=0.01)
    assert np.abs(before.imag).max() > 0.01


@pytest.mark.filterwarnings("error")
def test_it_is_split_and_its_gradient_compared_with_both_parts_of_the_weights():
    task = Task("task.py", build, batches)
    backend = KerasBackend()
    facts = backend.describe(task, device="cpu", seed=0, batch_size=8, report=lambda *_: None)
    assert facts.splittable
    traced = backend.tracer(task, device="cpu", seed=0, report=lambda *_: None)
    traced.reference(batch_size=8, steps=3, checkpoints=(0, 2))
    for point in traced.compare_steps(recipe=FLOAT16):
        assert 0 < point.gradient_error < 0.02
