"""Checks during training in Keras: bit-equal trainings, late breaks told and mended, loops."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest

from autoprec import Recipe, apply_profile
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import LossScale
from autoprec.errors import AutoprecError

pytestmark = pytest.mark.keras

layers = keras.layers
BFLOAT16 = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=8)
FLOAT16 = Recipe(
    policy=Policy.MIXED_FLOAT16, batch_size=8, loss_scale=LossScale(mode="dynamic", initial=2.0**40)
)
SCALED = replace(FLOAT16, loss_scale=LossScale(mode="dynamic", initial=2.0**8))


def healthy() -> Any:
    return keras.Sequential(
        [
            layers.Input((8,)),
            layers.Dense(16),
            layers.BatchNormalization(),
            layers.Activation("tanh"),
            layers.Dropout(0.2),
            layers.Dense(2),
        ]
    )


class Angles(layers.Layer):
    """Sines of its input times a number that grows with every call."""

    def build(self, shape: Any) -> None:
        self.size = self.add_weight(shape=(), initializer="ones", trainable=False, name="size")

    def call(self, given: Any) -> Any:
        size = keras.ops.cast(self.size, given.dtype)
        self.size.assign(keras.ops.minimum(self.size * 1.6, 1e4))
        return keras.ops.sin(given * size)


class Variance(layers.Layer):
    """A norm by the difference of two large numbers."""

    def build(self, shape: Any) -> None:
        self.size = self.add_weight(shape=(), initializer="ones", trainable=False, name="size")

    def call(self, given: Any) -> Any:
        self.size.assign(keras.ops.minimum(self.size * 1.6, 20.0))
        large = given + keras.ops.cast(self.size, given.dtype)
        mean = keras.ops.mean(large, axis=-1, keepdims=True)
        square = keras.ops.mean(large * large, axis=-1, keepdims=True)
        return (large - mean) / keras.ops.sqrt(keras.ops.abs(square - mean * mean) + 1e-2)


class NormInput(layers.Layer):
    """A norm whose squares overflow float16."""

    def build(self, shape: Any) -> None:
        self.size = self.add_weight(shape=(), initializer="ones", trainable=False, name="size")

    def call(self, given: Any) -> Any:
        self.size.assign(keras.ops.minimum(self.size * 1.6, 1000.0))
        large = given * keras.ops.cast(self.size, given.dtype)
        return large / keras.ops.sqrt(keras.ops.mean(large * large, -1, keepdims=True) + 1e-2)


class Ratio(layers.Layer):
    """PPO's ratio of an action's probabilities, under a policy that becomes certain."""

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], 2), name="kernel")
        self.size = self.add_weight(shape=(), initializer="ones", trainable=False, name="size")

    def call(self, given: Any) -> Any:
        cast = keras.ops.cast
        size, exact = cast(self.size, "float32"), cast(given, "float32")
        self.size.assign(keras.ops.minimum(self.size * 1.6, 3000.0))
        drawn = exact[:, :2]
        rolled = exact @ cast(self.kernel, "float32")
        action = keras.ops.stop_gradient(rolled + (0.2 + drawn) / size)
        now = ((action - cast(given @ cast(self.kernel, given.dtype), "float32")) * size) ** 2
        return keras.ops.exp(keras.ops.sum(drawn**2 - now, -1, keepdims=True) / 2)


class Lengths(layers.Layer):
    """A mean over positions, as a sum that overflows float16 where there are many."""

    def call(self, given: Any) -> Any:
        total = keras.ops.sum((given + 4) * 10, 1)
        return total / (10 * keras.ops.cast(keras.ops.shape(given)[1], given.dtype))


def breaking(layer: Callable[[], Any]) -> Any:
    return keras.Sequential(
        [layers.Input((8,)), layers.Dense(16), layer(), layers.Dense(2, name="last")]
    )


def data(count: int = 160) -> tuple[Any, Any]:
    random = np.random.default_rng(1)
    inputs = random.normal(size=(count, 8)).astype("float32")
    return inputs, np.tanh(inputs @ random.normal(size=(8, 2))).astype("float32")


def fitted(
    make: Callable[[], Any], recipe: Recipe = BFLOAT16, *, watch: Any = "warn", epochs: int = 2
) -> tuple[Any, Any, list[float]]:
    keras.utils.set_random_seed(0)
    model = make()
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    precision = apply_profile(recipe, model=model, watch=watch, watch_every=4)
    history = model.fit(*data(), batch_size=8, epochs=epochs, verbose=0)
    return model, precision, [*history.history["loss"], *history.history["mae"]]


@pytest.mark.parametrize(
    "recipe",
    [BFLOAT16, FLOAT16, replace(BFLOAT16, accumulation_steps=2)],
    ids=["bfloat16", "float16", "accumulated"],
)
def test_a_watched_fit_is_the_unwatched_one(recipe: Recipe) -> None:
    watched, precision, losses = fitted(healthy, recipe)
    unwatched, _, others = fitted(healthy, recipe, watch=False)
    assert losses == others
    for ours, theirs in zip(watched.variables, unwatched.variables, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    checks = precision.watched
    assert len(checks) >= 4
    assert [each.updates for each in checks[:2]] == [1, 5] or recipe is FLOAT16
    assert all(each.samples == 8 for each in checks), checks
    assert not any(each.problem or each.not_checked for each in checks), checks


@pytest.mark.parametrize("layer", [Angles, Variance])
def test_a_late_break_is_told_and_mended(layer: Callable[[], Any]) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        _, precision, _ = fitted(lambda: breaking(layer), watch="float32", epochs=3)
    checks = precision.watched
    acted = [index for index, each in enumerate(checks) if each.action]
    assert not checks[0].problem
    assert acted, checks
    assert any("is kept in float32" in str(each.message) for each in said)
    after = checks[acted[-1] + 1 :]
    assert len(after) >= 2
    assert not any(each.problem for each in after), checks
    kept = precision.state_dict()["watch"]["float32_modules"]
    assert kept
    assert "last" not in kept


@pytest.mark.parametrize(("layer", "recipe"), [(NormInput, SCALED), (Ratio, BFLOAT16)])
def test_later_breaks_are_told(layer: Callable[[], Any], recipe: Recipe) -> None:
    with pytest.warns(Warning, match="All checks are in precision.watched"):
        _, precision, _ = fitted(lambda: breaking(layer), recipe, epochs=2)
    checks = precision.watched
    assert not checks[0].problem
    assert any(each.action for each in checks), checks


def test_a_batch_that_is_long_now_and_then_is_told_by_the_next_long_one() -> None:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [layers.Input((None, 8)), layers.Dense(16), Lengths(), layers.Dense(2)]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse")
    precision = apply_profile(SCALED, model=model, watch="float32", watch_every=4)
    inputs, targets = data(8)

    def batches() -> Any:
        for index in itertools.count():
            length = 4000 if index > 8 and index % 8 == 0 else 4 + index % 2
            yield np.repeat(inputs[:, None], length, 1), targets

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model.fit(batches(), steps_per_epoch=40, verbose=0, shuffle=False)
    assert any("lengths is kept in float32" in str(each.message) for each in said)
    assert not precision.watched[0].problem
    assert [each.updates for each in precision.watched if each.problem] == [17, 25]
    assert not precision.watched[-1].problem


def test_a_fault_is_warned_of_or_raised() -> None:
    with pytest.warns(Warning, match="updates in mixed_bfloat16 .*in float32"):
        fitted(lambda: breaking(Angles))
    with pytest.raises(AutoprecError, match="updates in mixed_bfloat16"):
        fitted(lambda: breaking(Angles), watch="raise")


def test_a_loop_shows_its_batches() -> None:
    keras.utils.set_random_seed(0)
    model = healthy()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    precision = apply_profile(BFLOAT16, model=model, watch_every=2)
    inputs, targets = data(48)
    before = [np.asarray(v) for v in model.variables]
    precision.watch(inputs[:8], targets[:8])
    for ours, theirs in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), theirs)
    for start in range(8, 48, 8):
        precision.watch(inputs[start : start + 8], targets[start : start + 8])
    assert [each.updates for each in precision.watched] == [1, 3, 5]
    state = precision.state_dict()
    other = apply_profile(BFLOAT16, model=model, watch_every=2)
    other.load_state_dict(state)
    assert other.watched == precision.watched


def test_nothing_is_watched_in_float32() -> None:
    _, precision, _ = fitted(healthy, Recipe(batch_size=8), epochs=1)
    assert precision.watched == ()
