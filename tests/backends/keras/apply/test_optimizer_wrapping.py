"""Wrapped optimizers train as the user's own would: factors, accumulation, averages, several."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autoprec.backends.keras.surgeon import KerasSurgeon
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import LossScale, Recipe
from autoprec.errors import AutoprecWarning
from tests.backends.keras.keras_models import (
    OwnTrainStep,
    Pair,
    Unscaled,
    compiled,
    data,
    eagerly,
    softmax_net,
)
from tests.backends.keras.kinds import Gan

FLOAT16 = Recipe(policy=Policy.MIXED_FLOAT16, loss_scale=LossScale(initial=256.0))
RECIPES = {
    "accumulation": Recipe(accumulation_steps=2),
    "float16": FLOAT16,
    "both": Recipe(FLOAT16.policy, loss_scale=FLOAT16.loss_scale, accumulation_steps=2),
}


def apply(recipe: Recipe, model: Any = None) -> Any:
    return KerasSurgeon().apply(recipe, model=model)


def moved(model: Any, batch_size: int = 8, samples: int = 32) -> list[Any]:
    before = [w.numpy() for w in model.trainable_weights]
    x, y = data(samples)
    model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0)
    return [w.numpy() - b for w, b in zip(model.trainable_weights, before, strict=True)]


def seeded(**arguments: Any) -> Any:
    keras.utils.set_random_seed(1)
    return softmax_net(**arguments)


@functools.cache
def moved_by_plain_descent(batch_size: int) -> list[Any]:
    return moved(eagerly(seeded(optimizer=keras.optimizers.SGD(0.1))), batch_size)


@pytest.mark.parametrize("name", RECIPES)
def test_a_loss_scale_factor_of_the_users_own_changes_nothing(name: str) -> None:
    recipe = RECIPES[name]
    plain = moved_by_plain_descent(8 * recipe.accumulation_steps)
    own = keras.optimizers.SGD(0.1, loss_scale_factor=1000.0)
    model = seeded(optimizer=own)
    precision = apply(recipe, model)
    for mine, theirs in zip(moved(model), plain, strict=True):
        assert np.abs(mine).max() == pytest.approx(np.abs(theirs).max(), rel=5e-2)
    precision.restore()
    assert model.optimizer is own
    assert own.loss_scale_factor == 1000.0


@pytest.mark.parametrize("name", ["accumulation", "both"])
def test_fit_ends_with_what_is_left(name: str) -> None:
    """Three batches of 8: an update of 16, and one of the 8 that are left."""
    model = seeded(optimizer=keras.optimizers.SGD(0.1))
    precision = apply(RECIPES[name], model)
    accumulated = moved(model, samples=24)
    assert precision.steps == 2
    assert not precision.flush()
    plain = eagerly(seeded(optimizer=keras.optimizers.SGD(0.1)))
    x, y = data(24)
    before = [w.numpy() for w in plain.trainable_weights]
    for rows in (slice(0, 16), slice(16, 24)):
        plain.fit(x[rows], y[rows], shuffle=False, verbose=0)
    for mine, now, then in zip(accumulated, plain.trainable_weights, before, strict=True):
        assert np.allclose(mine, now.numpy() - then, atol=1e-3)


def test_a_loop_is_told_when_kerass_own_accumulation_updates() -> None:
    model = seeded(optimizer=keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    precision = apply(FLOAT16, model)
    loss_fn = keras.losses.SparseCategoricalCrossentropy()
    x, y = data(32)
    answers, really = [], []
    for start in range(0, 32, 8):
        with tf.GradientTape() as tape:
            loss = precision.scale_loss(loss_fn(y[start : start + 8], model(x[start : start + 8])))
        gradients = tape.gradient(loss, model.trainable_variables)
        before = model.get_weights()
        answers.append(
            precision.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        )
        after = model.get_weights()
        really.append(any(np.any(a != b) for a, b in zip(before, after, strict=True)))
    assert answers == really == [False, True, False, True]
    assert precision.steps == 2


@pytest.mark.parametrize("name", RECIPES)
def test_averaged_weights_are_swapped_in_and_out(name: str) -> None:
    def trained(recipe: Recipe | None, batch_size: int) -> Any:
        model = seeded(optimizer=keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5))
        if recipe is None:
            eagerly(model)
        else:
            apply(recipe, model)
        x, y = data(32)
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0, epochs=2, callbacks=[swap])
        return model.get_weights()

    recipe = RECIPES[name]
    plain = trained(None, 8 * recipe.accumulation_steps)
    for mine, theirs in zip(trained(recipe, 8), plain, strict=True):
        assert np.allclose(mine, theirs, atol=2e-3)


def test_a_softmax_layer_as_activation_is_computed_in_float32() -> None:
    layers = keras.layers
    last = layers.Dense(4, activation=layers.Softmax())
    for model in (
        compiled(keras.Sequential([layers.Input((8,)), layers.Dense(8), last])),
        compiled(keras.Sequential([layers.Dense(8), layers.Dense(4, activation=layers.Softmax())])),
    ):
        apply(Recipe(policy=Policy.MIXED_BFLOAT16), model)
        sums = keras.ops.convert_to_numpy(model(data()[0])).sum(axis=-1)
        assert np.abs(sums - 1).max() < 1e-6


def test_a_train_step_that_never_scales_is_warned_of_and_not_unscaled() -> None:
    def built(kind: Any) -> Any:
        keras.utils.set_random_seed(2)
        model = kind()
        model(data()[0])
        return compiled(model, optimizer=keras.optimizers.SGD(0.5))

    plain = moved(eagerly(built(OwnTrainStep)))
    model = built(Unscaled)
    apply(FLOAT16, model)
    with pytest.warns(AutoprecWarning, match=r"never scaled.*scale_loss"):
        unscaled = moved(model)
    for mine, theirs in zip(unscaled, plain, strict=True):
        assert np.allclose(mine, theirs, atol=2e-3)
        assert np.abs(mine).max() > 1e-3
    with warnings.catch_warnings():
        warnings.simplefilter("error", AutoprecWarning)
        moved(eagerly(model))


@pytest.mark.parametrize("before_build", [False, True])
def test_the_optimizers_of_a_gan_accumulate(before_build: bool) -> None:
    x = data(32)[0]
    recipe = Recipe(accumulation_steps=2)
    keras.utils.set_random_seed(3)
    optimizers = keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1)
    precision = apply(recipe) if before_build else None
    model = Pair()
    if precision is None:
        precision = apply(recipe, model)
    with precision:
        model.compile(*optimizers)
        model.fit(x, batch_size=8, verbose=0)
        assert [int(o.iterations) for o in optimizers] == [2, 2], "4 batches, 2 for one update"
        assert precision.steps == 2
        assert model.d_optimizer.inner_optimizer is optimizers[0]
    assert (model.d_optimizer, model.g_optimizer) == optimizers


def kept(how: str) -> Any:
    """A GAN that keeps its two optimizers as `how` says, and can say which two it trains with."""

    class Keeps(Pair):
        @property
        def d_optimizer(self) -> Any:
            return self.kept["of"]["d"] if how == "dict" else self.kept[0]

        @d_optimizer.setter
        def d_optimizer(self, value: Any) -> None:
            self.first = value

        @property
        def g_optimizer(self) -> Any:
            return self.kept["of"]["g"] if how == "dict" else self.kept[1]

        @g_optimizer.setter
        def g_optimizer(self, value: Any) -> None:
            first = vars(self).pop("first")
            forms = {
                "list": [first, value],
                "tuple": (first, value),
                "dict": {"of": {"d": first, "g": value}},
            }
            self.kept = forms[how]

    return Keeps()


def test_optimizers_in_a_list_or_dict_train_as_those_in_attributes() -> None:
    x = data(32)[0]
    outcomes = []
    for how in ("attributes", "list", "tuple", "dict"):
        keras.utils.set_random_seed(3)
        optimizers = keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1)
        model = Pair() if how == "attributes" else kept(how)
        precision = apply(RECIPES["both"], model)
        model.compile(*optimizers)
        eagerly(model)
        with precision:
            assert len(precision.optimizers) == 3, "with compile's own"
            assert model.g_optimizer.inner_optimizer.inner_optimizer is optimizers[1]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", AutoprecWarning)  # it never scales
                model.fit(x, batch_size=8, shuffle=False, verbose=0)
            assert [int(o.iterations) for o in optimizers] == [2, 2]
        outcomes.append(model.get_weights())
        assert (model.d_optimizer, model.g_optimizer) == optimizers
    for weights in zip(*outcomes, strict=True):
        assert all(np.array_equal(each, weights[0]) for each in weights)


@pytest.mark.parametrize("name", ["accumulation", "both"])
def test_fit_ends_with_what_is_left_of_each_optimizer(name: str) -> None:
    x = data(24)[0]
    outcomes = []
    for fits in (True, False):
        keras.utils.set_random_seed(3)
        optimizers = keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1)
        model = Gan()
        precision = apply(RECIPES[name], model)
        model.compile(*optimizers)
        if name == "both" or not fits:  # float16 is rounded otherwise in a trace
            eagerly(model)
        if fits:
            model.fit(x, batch_size=8, shuffle=False, verbose=0)
        else:
            for start in range(0, 24, 8):
                model.train_on_batch(x[start : start + 8])
            assert precision.flush()
        assert [int(o.iterations) for o in optimizers] == [2, 2], "3 batches: 2, and what is left"
        assert not precision.flush()
        outcomes.append(model.get_weights())
        precision.restore()
        assert "finalize_variable_values" not in vars(model.optimizer)
    for mine, theirs in zip(*outcomes, strict=True):
        assert np.allclose(mine, theirs, atol=1e-6)


def test_an_own_loss_scale_of_a_second_optimizer_is_put_back() -> None:
    own = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    model = Pair()
    model.compile(keras.optimizers.SGD(0.1), own)
    with apply(FLOAT16, model):
        assert model.g_optimizer is not own
    assert model.g_optimizer is own
