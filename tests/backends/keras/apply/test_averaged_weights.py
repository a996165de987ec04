"""Averages of the weights and second models are evaluated in one dtype, with the right values."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from autoprec import apply_profile
from autoprec.core.recipe import LossScale, Recipe
from tests.backends.keras.keras_models import data

layers = keras.layers
RECIPES = {
    "bfloat16": Recipe("mixed_bfloat16", batch_size=8),
    "float16": Recipe("mixed_float16", batch_size=8, loss_scale=LossScale(initial=64.0)),
    "accumulating": Recipe(
        "mixed_float16", batch_size=8, accumulation_steps=2, loss_scale=LossScale(initial=64.0)
    ),
}
X, Y = data(32)


def net():
    return keras.Sequential(
        [
            layers.Input((8,)),
            layers.Dense(16, activation="relu"),
            layers.BatchNormalization(),
            layers.Dense(4),
        ]
    )


def compiled(model):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5), loss)
    return model


def ready(model):
    """Compile the model and make its optimizer's variables: the step is traced once, not twice."""
    compiled(model).optimizer.build(model.trainable_variables)
    return model


def copied(model):
    copy = keras.models.clone_model(model)
    copy.set_weights(model.get_weights())
    return copy


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_copies_made_before_and_after_a_profile_evaluate_alike(recipe):
    model = ready(net())
    before = copied(model)
    with apply_profile(recipe, model=model):
        model.fit(X, Y, batch_size=8, verbose=0)
        after = copied(model)
        before.set_weights(model.get_weights())
        ours = model(X)
        one, two = before(X), after(X)
    assert ours.dtype == one.dtype == two.dtype == "float32"
    assert before.layers[0].compute_dtype == after.layers[0].compute_dtype == "float32"
    np.testing.assert_array_equal(one, two)
    np.testing.assert_allclose(ours, one, atol=0.05)


def test_a_copy_under_the_global_form_has_float32_outputs_too():
    with apply_profile(RECIPES["bfloat16"]):
        model = compiled(net())
        model.fit(X, Y, batch_size=8, verbose=0)
        copy = copied(model)
        assert model(X).dtype == copy(X).dtype == "float32"
        np.testing.assert_array_equal(model(X), copy(X))


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_the_optimizers_own_average_is_evaluated_by_the_callback(recipe):
    model = compiled(net())
    swap = keras.callbacks.SwapEMAWeights()
    with apply_profile(recipe, model=model) as precision:
        model.fit(X, Y, batch_size=8, epochs=2, validation_data=(X, Y), callbacks=[swap], verbose=0)
        inner = list(_chain(precision.optimizer))[-1]
        averages = [v.numpy() for v in inner._model_variables_moving_average]
        # `fit` ends by giving the averages to the model.
        for ours, average in zip(model.trainable_variables, averages, strict=True):
            np.testing.assert_allclose(ours.numpy(), average, rtol=1e-6)
            assert ours.dtype == "float32"
        assert model(X).dtype == "float32"


def _chain(optimizer):
    yield optimizer
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
        yield optimizer


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_the_average_is_that_of_the_weights_after_each_update(recipe):
    model = ready(net())
    expected = []
    with apply_profile(recipe, model=model) as precision:
        for start in range(0, 32, 8):
            updates = precision.steps
            model.train_on_batch(X[start : start + 8], Y[start : start + 8])
            if precision.steps > updates:
                now = [v.numpy() for v in model.trainable_variables]
                before = expected or now  # Keras's average begins with the first update
                expected = [0.5 * e + 0.5 * n for e, n in zip(before, now, strict=True)]
        assert precision.skipped == 0
        precision.optimizer.finalize_variable_values(model.trainable_variables)
    for ours, average in zip(model.trainable_variables, expected, strict=True):
        np.testing.assert_allclose(ours.numpy(), average, rtol=1e-4, atol=1e-6)


class AverageOfSteps(keras.callbacks.Callback):
    """Averages the weights over all steps, and takes the average at the end of training."""

    def on_train_begin(self, logs=None):
        self.count, self.mean = 0, [np.zeros(w.shape) for w in self.model.weights]

    def on_train_batch_end(self, batch, logs=None):
        self.count += 1
        pairs = zip(self.mean, self.model.get_weights(), strict=True)
        self.mean = [mean + (weight - mean) / self.count for mean, weight in pairs]

    def on_train_end(self, logs=None):
        self.model.set_weights(self.mean)


def test_an_average_that_a_callback_takes_is_of_float32_weights_and_stays():
    model, callback = compiled(net()), AverageOfSteps()
    with apply_profile(RECIPES["float16"], model=model):
        model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[callback])
        for found, mean in zip(model.get_weights(), callback.mean, strict=True):
            np.testing.assert_allclose(found, mean, rtol=1e-6, atol=1e-7)


class WithTeacher(keras.Model):
    """Moves a copy of its network after each update, and learns from it."""

    def __init__(self):
        super().__init__()
        self.network, self.teacher = net(), net()
        self.teacher.set_weights(self.network.get_weights())
        self.teacher.trainable = False

    def call(self, x, training=False):
        return self.network(x, training=training)

    def train_step(self, given):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(given)
        with tf.GradientTape() as tape:
            z = self(x, training=True)
            apart = keras.ops.mean(keras.ops.square(keras.ops.subtract(z, self.teacher(x))))
            scaled = self.optimizer.scale_loss(self.compute_loss(y=y, y_pred=z) + apart)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, weights), weights)
        for mean, weight in zip(self.teacher.weights, self.network.weights, strict=True):
            mean.assign(0.9 * mean + 0.1 * weight)
        return {}


def test_a_teacher_inside_a_train_step_keeps_its_values_through_a_skipped_step():
    model = compiled(WithTeacher())
    model(X)
    with apply_profile(RECIPES["float16"], model=model) as precision:
        model.train_on_batch(X, Y)
        model.train_on_batch(np.full_like(X, np.inf), Y)
        model.train_on_batch(X, Y)
        assert (precision.steps, precision.skipped) == (2, 1)
    assert all(np.isfinite(w.numpy()).all() for w in model.weights)
