"""Checks during training in Keras: bit-equal trainings, late breaks told and mended, loops."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autoprec import Recipe, apply_profile
from autoprec.core.recipe import LossScale
from autoprec.errors import AutoprecError, AutoprecWarning
from benchmarks.numerics.late_breaks import BFLOAT16, FLOAT16, QUICK, RECIPES, Pace
from benchmarks.numerics.late_breaks_keras import data, trained

pytestmark = pytest.mark.keras

layers = keras.layers
SKIPPING = replace(FLOAT16, loss_scale=LossScale(mode="dynamic", initial=2.0**40))


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


def fitted(
    make: Callable[[], Any], recipe: Recipe = BFLOAT16, *, watch: Any = "warn", epochs: int = 2
) -> tuple[Any, Any, list[float]]:
    keras.utils.set_random_seed(0)
    model = make()
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    precision = apply_profile(recipe, model=model, watch=watch, watch_every=4)
    history = model.fit(*data(160), batch_size=8, epochs=epochs, verbose=0)
    return model, precision, [*history.history["loss"], *history.history["mae"]]


@pytest.mark.parametrize(
    "recipe",
    [BFLOAT16, SKIPPING, replace(BFLOAT16, accumulation_steps=2)],
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
    assert [each.updates for each in checks[:2]] == [1, 5] or recipe is SKIPPING
    assert all(each.samples == 8 for each in checks), checks
    assert not any(each.problem or each.not_checked for each in checks), checks


def broken(name: str, watch: str, updates: int = 60) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        precision, _ = trained(
            name, RECIPES[name], QUICK, watch=watch, every=6, updates=updates, epochs=2
        )
    return precision, [str(each.message) for each in said if "updates in" in str(each.message)]


@functools.cache
def mended(name: str) -> tuple[Any, list[str]]:
    return broken(name, "float32")


#: Of every recipe and of Keras's own layers, one that is looked at every day: torch's twins of all
#: breaks are, and what judges both is the same.
DAILY = ("logit scale", "frequency", "gradients decay", "batch norm overflow", "long batch")


@pytest.mark.parametrize(
    "name",
    [n if n in DAILY else pytest.param(n, marks=pytest.mark.slow) for n in RECIPES],
)
def test_a_late_break_is_told_and_mended(name: str) -> None:
    precision, said = mended(name)
    checks = precision.watched
    assert not checks[0].problem, "healthy at first"
    acted = [index for index, each in enumerate(checks) if each.action]
    assert acted, "\n".join(map(str, checks))
    assert "is kept in float32" in said[0]
    after = checks[acted[-1] + 1 :]
    assert len(after) >= 2
    assert sum(bool(each.problem) for each in after) <= 1, after
    assert precision.state_dict()["watch"]["float32_modules"]


@pytest.mark.slow
def test_a_batch_that_overflows_now_and_then_is_looked_for() -> None:
    """Checks are due at updates 1, 50, 100 and 200, none of which has a long batch."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        precision, _ = trained(
            "long batch", FLOAT16, Pace(1.0, 8, 30), watch="float32", every=2000, updates=300
        )
    assert any("is kept in float32" in str(each.message) for each in said)
    failed = [each.updates for each in precision.watched if each.problem]
    assert failed == [211]


def skip_an_update_eagerly(precision: Any, model: Any) -> None:
    optimizer = precision.wrap(keras.optimizers.SGD(0.1))
    inputs, targets = data(8)
    with tf.GradientTape() as tape:
        loss = optimizer.scale_loss(keras.ops.mean((model(inputs) - targets) ** 2))
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    assert precision.skipped == 1


def test_a_check_is_no_step_whose_state_a_skipped_update_puts_back() -> None:
    """What this process ran eagerly last is another model's update, which was skipped."""
    other = healthy()
    precision = apply_profile(SKIPPING, model=other)
    skip_an_update_eagerly(precision, other)
    checks = broken("gradients decay", "float32")[0].watched
    precision.restore()
    assert any(each.action for each in checks), checks


def test_a_skipped_update_of_a_loop_that_ended_puts_nothing_back() -> None:
    models = healthy(), healthy()
    with apply_profile(SKIPPING, model=models[0]) as precision:
        skip_an_update_eagerly(precision, models[0])
    with apply_profile(SKIPPING, model=models[1]):
        mean = models[1].layers[1].moving_mean
        mean.assign(np.full(16, np.inf))
        assert np.isinf(mean.numpy()).all()


def test_weights_that_are_lost_between_two_checks_are_told_of() -> None:
    """Float32 gives what is not finite there as well, so that there is nothing to compare."""
    keras.utils.set_random_seed(0)
    model = healthy()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    precision = apply_profile(BFLOAT16, model=model, watch="float32", watch_every=2)
    inputs, targets = data(48)
    model.fit(inputs, targets, batch_size=8, verbose=0)
    model.layers[-1].bias.assign([0.0, np.nan])
    lost = f"after 6 updates .* weights are not finite in {model.layers[-1].name}. Nothing mends"
    with pytest.warns(AutoprecWarning, match=lost):
        model.fit(inputs[:8], targets[:8], batch_size=8, verbose=0)
    assert [bool(each.problem) for each in precision.watched] == [False, False, False, True]
    assert precision.state_dict()["watch"]["float32_modules"] == []


def test_what_mends_is_few_layers() -> None:
    precision, said = mended("frequency")
    assert "last" not in precision.state_dict()["watch"]["float32_modules"]
    assert any("frequency" in each for each in said)


def test_a_fault_is_warned_of_or_raised() -> None:
    _, said = broken("frequency", "warn", updates=30)
    assert "updates in mixed_bfloat16" in said[0]
    assert "All checks are in precision.watched" in said[0]
    with pytest.raises(AutoprecError, match="updates in mixed_bfloat16"):
        broken("frequency", "raise")


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
