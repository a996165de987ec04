"""Training that goes past a profile says so at the first updates, once, with what to add."""

from __future__ import annotations

import warnings

import keras
import pytest
import tensorflow as tf

from autoprec import apply_profile
from autoprec.core.recipe import LossScale, Recipe
from autoprec.errors import AutoprecWarning
from tests.backends.keras.keras_models import Pair, Subclassed, compiled, data, softmax_net

BFLOAT16 = Recipe("mixed_bfloat16", batch_size=8)
FLOAT16 = Recipe("mixed_float16", batch_size=8, loss_scale=LossScale(initial=64.0))
LOSS = keras.losses.SparseCategoricalCrossentropy()


def loop(model, optimizer, *, scaled=False, traced=False):
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = LOSS(y, model(x, training=True))
            loss = optimizer.scale_loss(loss) if scaled else loss
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    if traced:
        optimizer.build(model.trainable_variables)
    run = tf.function(step) if traced else step
    x, y = data(8)
    for _ in range(4):
        run(tf.constant(x), tf.constant(y))


def uncompiled():
    return keras.models.clone_model(softmax_net())


def said(train):
    """Return what `train` warns of."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        train()
    return [str(each.message) for each in found if each.category is AutoprecWarning]


@pytest.mark.parametrize("recipe", [BFLOAT16, FLOAT16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("way", ["compiled before", "compiled after", "loop", "traced loop"])
def test_a_model_made_before_the_policy_is_named_once(way, recipe):
    model = uncompiled()
    if way == "compiled before":
        compiled(model)
    with apply_profile(recipe):
        if way == "compiled after":
            compiled(model)
        if model.compiled:
            (warning,) = said(lambda: model.fit(*data(32), batch_size=8, epochs=2, verbose=0))
        else:
            adam = keras.optimizers.Adam()
            (warning,) = said(lambda: loop(model, adam, traced=way == "traced loop"))
        assert "made before apply_profile" in warning
        assert "apply_profile(profile, model=model)" in warning


@pytest.mark.parametrize("form", ["global", "model", "optimizer"])
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_an_optimizer_called_past_the_loss_scale_is_named_once(form, traced):
    adam = keras.optimizers.Adam()
    model = None if form == "global" else uncompiled()
    optimizer = adam if form == "optimizer" else None
    with apply_profile(FLOAT16, model=model, optimizer=optimizer):
        model = model or uncompiled()
        (warning,) = said(lambda: loop(model, adam, traced=traced))
        assert "the loss is not scaled" in warning
        assert "optimizer = precision.wrap(optimizer)" in warning
        assert "optimizer.scale_loss(loss)" in warning


def test_a_loss_scale_of_the_scripts_own_is_named():
    model = uncompiled()
    own = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    with apply_profile(FLOAT16, model=model):
        (warning,) = said(lambda: loop(model, own, scaled=True))
        assert "called past the profile" in warning


def test_accumulation_that_is_left_out_is_named():
    model = uncompiled()
    recipe = Recipe("mixed_bfloat16", batch_size=8, accumulation_steps=2)
    with apply_profile(recipe, model=model):
        (warning,) = said(lambda: loop(model, keras.optimizers.Adam()))
        assert "nothing is accumulated" in warning


@pytest.mark.parametrize("recipe", [BFLOAT16, FLOAT16], ids=["bfloat16", "float16"])
def test_training_by_the_profile_says_nothing(recipe):
    def by_model():
        model = compiled(uncompiled())
        with apply_profile(recipe, model=model):
            model.fit(*data(32), batch_size=8, verbose=0)

    def by_loop():
        model = uncompiled()
        with apply_profile(recipe, model=model) as precision:
            loop(model, precision.wrap(keras.optimizers.Adam()), scaled=True)

    def by_global():
        with apply_profile(recipe):
            compiled(Subclassed()).fit(*data(32), batch_size=8, verbose=0)

    for train in (by_model, by_loop, by_global):
        assert said(train) == []
    assert "apply" not in vars(keras.optimizers.Optimizer)


def test_nor_does_training_with_two_optimizers():
    model = Pair()
    model.compile(keras.optimizers.SGD(0.05), keras.optimizers.SGD(0.01))
    with apply_profile(BFLOAT16, model=model):
        assert said(lambda: model.fit(data(32)[0], batch_size=8, verbose=0)) == []


def test_a_float32_profile_has_nothing_to_say():
    model = compiled(uncompiled())
    with apply_profile(Recipe(batch_size=8)):
        assert said(lambda: model.fit(*data(32), batch_size=8, verbose=0)) == []


class ByHand(Subclassed):
    """Moves its weights itself, by TensorFlow's own operations."""

    def train_step(self, given):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(given)
        with tf.GradientTape() as tape:
            loss = LOSS(y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        for variable, gradient in zip(self.trainable_variables, gradients, strict=True):
            variable.assign_sub(0.05 * gradient)
        return {"loss": loss}


class Waiting(ByHand):
    """Changes nothing."""

    def train_step(self, given):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(given)
        return {"loss": LOSS(y, self(x, training=True))}


@pytest.mark.parametrize(
    "recipe",
    [FLOAT16, Recipe("mixed_bfloat16", batch_size=8, accumulation_steps=2)],
    ids=["float16", "accumulation"],
)
def test_weights_that_a_train_step_moves_itself_are_told_once(recipe):
    def train(kind):
        model = compiled(kind())
        with apply_profile(recipe, model=model):
            model.fit(*data(48), batch_size=8, epochs=2, verbose=0)

    (warning,) = said(lambda: train(ByHand))
    assert "train_step changes weights by itself" in warning
    assert "the loss is not scaled" in warning
    assert "self.optimizer.apply_gradients" in warning
    assert said(lambda: train(Waiting)) == []
    assert said(lambda: train(Subclassed)) == []
