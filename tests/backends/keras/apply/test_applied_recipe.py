"""A recipe reaches a model in whatever order a script builds, compiles, loads and applies."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autoprec.backends.keras.apply.compile_overrides import retrace_functions
from autoprec.backends.keras.apply.method_hooks import Hook
from autoprec.backends.keras.surgeon import KerasSurgeon
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Alignment, LossScale, Recipe
from autoprec.errors import AutoprecWarning, UsageError
from tests.backends.keras.keras_models import compiled, data

#: Everything a recipe can ask of a Keras model at once.
WHOLE = Recipe(
    policy=Policy.MIXED_FLOAT16,
    loss_scale=LossScale(initial=256.0, mode="fixed"),
    float32_modules=("middle",),
    accumulation_steps=4,
    compile=True,
    alignment=Alignment(8, ("first",)),
    knobs={"steps_per_execution": 2},
)
PLAIN = Recipe(policy=Policy.MIXED_BFLOAT16)


def apply(recipe: Recipe, model: Any = None, **arguments: Any) -> Any:
    return KerasSurgeon().apply(recipe, model=model, **arguments)


def net() -> Any:
    """A model that every part of `WHOLE` has something to do on; not compiled."""
    keras.utils.set_random_seed(5)
    return keras.Sequential(
        [
            keras.layers.Input((8,)),
            keras.layers.Dense(15, activation="relu", name="first"),
            keras.layers.Dense(16, activation="relu", name="middle"),
            keras.layers.Dense(4, activation="softmax", name="last"),
        ]
    )


def before_build(tmp_path: Any) -> Any:
    precision = apply(WHOLE)
    return precision, compiled(net(), optimizer=keras.optimizers.SGD(0.5))


def before_build_with_its_optimizer(tmp_path: Any) -> Any:
    optimizer = keras.optimizers.SGD(0.5)
    precision = apply(WHOLE, optimizers=(optimizer,))
    return precision, compiled(net(), optimizer=precision.optimizer)


def after_build(tmp_path: Any) -> Any:
    model = net()
    precision = apply(WHOLE, model)
    return precision, compiled(model, optimizer=keras.optimizers.SGD(0.5))


def after_compile(tmp_path: Any) -> Any:
    model = compiled(net(), optimizer=keras.optimizers.SGD(0.5))
    return apply(WHOLE, model), model


def compiled_again(tmp_path: Any) -> Any:
    model = compiled(net(), optimizer=keras.optimizers.Adam(1e-3))
    precision = apply(WHOLE, model)
    return precision, compiled(model, optimizer=keras.optimizers.SGD(0.5))


def compiled_again_with_what_is_there(tmp_path: Any) -> Any:
    model = compiled(net(), optimizer=keras.optimizers.SGD(0.5))
    precision = apply(WHOLE, model)
    return precision, compiled(model, optimizer=model.optimizer)


def saved(tmp_path: Any) -> Any:
    model = compiled(net(), optimizer=keras.optimizers.SGD(0.5))
    model.save(tmp_path / "model.keras")
    return tmp_path / "model.keras"


def after_load(tmp_path: Any) -> Any:
    model = keras.saving.load_model(saved(tmp_path))
    return apply(WHOLE, model), model


def before_load(tmp_path: Any) -> Any:
    path = saved(tmp_path)
    precision = apply(WHOLE)
    return precision, keras.saving.load_model(path)


ORDERS = [
    before_build,
    before_build_with_its_optimizer,
    after_build,
    after_compile,
    compiled_again,
    compiled_again_with_what_is_there,
    after_load,
    before_load,
]
#: In the other orders the step is not compiled by XLA, which takes longer than all the rest.
COMPILED = (before_build, after_compile)


@pytest.mark.parametrize("order", ORDERS)
def test_the_whole_recipe_arrives_in_every_order(order: Any, tmp_path: Any) -> None:
    precision, model = order(tmp_path)
    with precision:
        assert [each.compute_dtype for each in model.layers] == ["float16", "float32", "float16"]
        assert precision.report.islands == ("middle", "last (activation)")
        assert [padded.path for padded in precision.report.padded] == ["first"]
        assert (model.jit_compile, model.steps_per_execution) == (True, 2)
        if order not in COMPILED:
            model.jit_compile = False
            retrace_functions(model, watched=True)
        x, y = data(96)
        before = [w.numpy() for w in model.trainable_weights]
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        model.jit_compile = True
        assert precision.steps == 3, "12 batches, 4 of them for one update"
        assert int(model.optimizer.iterations) == 3
        assert precision.scale == 256.0
        assert model(x).dtype == tf.float32
        after = [w.numpy() for w in model.trainable_weights]
    moved = [np.abs(a - b).max() for a, b in zip(before, after, strict=True)]
    assert min(moved) > 1e-4
    expected = by_hand()
    for mine, theirs in zip(after, expected, strict=True):
        assert np.allclose(mine, theirs, atol=2e-3), "as three float32 updates of 32 samples"
    assert type(model.optimizer) is keras.optimizers.SGD
    assert (model.jit_compile, model.steps_per_execution) == (False, 1)


@functools.cache
def by_hand() -> list[Any]:
    model = compiled(net(), optimizer=keras.optimizers.SGD(0.5))
    x, y = data(96)
    model.fit(x, y, batch_size=32, shuffle=False, verbose=0)
    return [w.numpy() for w in model.trainable_weights]


def test_undoing_keeps_what_the_script_has_compiled_since() -> None:
    model = compiled(net(), optimizer=keras.optimizers.Adam(1e-2))
    first = apply(WHOLE, model)
    fine = keras.optimizers.SGD(1e-5)
    model.compile(fine, "sparse_categorical_crossentropy", steps_per_execution=3)
    second = apply(PLAIN, model)
    assert model.optimizer is fine
    x, y = data()
    before = model.get_weights()
    model.fit(x, y, verbose=0)
    moved = max(np.abs(a - b).max() for a, b in zip(before, model.get_weights(), strict=True))
    assert moved < 1e-4, "Adam would move every weight by its rate, 1e-2"
    second.restore()
    first.restore()
    assert model.optimizer is fine
    assert (model.jit_compile, model.steps_per_execution) == (False, 3)
    assert [each.compute_dtype for each in model.layers] == ["float32"] * 3


def test_undoing_keeps_an_optimizer_and_a_policy_set_by_hand() -> None:
    model = compiled(net())
    precision = apply(WHOLE, model)
    mine = keras.optimizers.SGD(1e-5)
    model.optimizer = mine
    model.layers[0].dtype_policy = "float64"
    model.steps_per_execution = 7
    precision.restore()
    assert model.optimizer is mine
    assert model.layers[0].compute_dtype == "float64"
    assert model.steps_per_execution == 7


def test_the_scale_of_a_new_optimizer_is_what_is_told() -> None:
    model = compiled(net())
    recipe = Recipe(
        policy=Policy.MIXED_FLOAT16, loss_scale=LossScale(initial=64.0, growth_interval=1)
    )
    precision = apply(recipe, model)
    x, y = data()
    model.fit(x, y, batch_size=8, verbose=0)
    assert precision.scale == 64.0 * 2**4
    compiled(model, optimizer=keras.optimizers.SGD(0.1))
    assert precision.scale == 64.0
    model.fit(x, y, batch_size=16, verbose=0)
    assert (precision.scale, precision.steps) == (64.0 * 2**2, 2)


def test_a_compile_that_fails_leaves_the_recipe_at_work() -> None:
    model = compiled(net())
    apply(WHOLE, model)
    with pytest.raises(ValueError, match="no_such_optimizer"):
        model.compile("no_such_optimizer", "mse")
    assert (model.jit_compile, model.steps_per_execution) == (True, 2)


def test_models_made_before_a_loop_carry_islands_from_their_first_call() -> None:
    recipe = Recipe(policy=Policy.MIXED_BFLOAT16, float32_modules=("middle",))
    with apply(recipe) as precision:
        model = net()
        assert precision.report.islands == (), "nothing is promised before there is a model"
        assert model(data()[0]).dtype == tf.float32
        assert precision.report.islands == ("middle", "last (activation)")
        assert model.layers[1].compute_dtype == "float32"


def test_every_model_made_under_a_policy_is_served_and_a_part_is_no_model_of_its_own() -> None:
    with apply(Recipe(policy=Policy.MIXED_BFLOAT16, accumulation_steps=2)) as precision:
        encoder = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(8)])
        inputs = keras.Input((8,))
        outputs = keras.layers.Dense(4, activation="softmax")(encoder(inputs))
        first = compiled(keras.Model(inputs, outputs))
        second = compiled(net())
        assert precision.model is second
        x, y = data()
        for model in (first, second):
            model.fit(x, y, batch_size=8, verbose=0)
            assert int(model.optimizer.iterations) == 2
        assert encoder.layers[0].compute_dtype == "bfloat16"
        assert encoder.layers[-1](x).dtype == tf.bfloat16, "only where a model ends is float32"
        assert encoder(x).dtype == tf.float32, "a script that calls it gets what a model gives"
        assert len(precision.optimizers) == 2


def test_a_model_without_the_islands_says_so_at_once() -> None:
    recipe = Recipe(policy=Policy.MIXED_BFLOAT16, float32_modules=("encoder/attention",))
    with apply(recipe), pytest.warns(AutoprecWarning, match=r"not applied.*encoder/attention"):
        compiled(net())
    with pytest.raises(UsageError, match="encoder/attention"):
        apply(recipe, net())


def test_a_second_policy_for_models_to_come_takes_the_place_of_the_first() -> None:
    first = apply(WHOLE)
    second = apply(PLAIN)
    model = compiled(net())
    assert model.layers[1].compute_dtype == "bfloat16"
    assert type(model.optimizer) is keras.optimizers.SGD
    first.restore()
    assert keras.config.dtype_policy().name == "mixed_bfloat16"
    second.restore()
    assert keras.config.dtype_policy().name == "float32"
    assert "compile" not in vars(net())


class Grows(keras.layers.Layer):
    """Makes its layers in `build`, as Keras's guide shows."""

    def build(self, shape: Any) -> None:
        self.one = keras.layers.Dense(16, activation="relu")
        self.two = keras.layers.Dense(16, dtype="float32")
        self.one.build(shape)
        self.two.build((*shape[:-1], 16))

    def call(self, x: Any) -> Any:
        return self.two(self.one(x))


class Growing(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.inside = Grows(name="inside")
        self.head = keras.layers.Dense(4, activation="softmax", name="head")

    def call(self, x: Any) -> Any:
        return self.head(self.inside(x))


def test_layers_made_in_build_have_the_recipe_too() -> None:
    recipe = Recipe(
        policy=Policy.MIXED_BFLOAT16,
        float32_modules=("head",),
        alignment=Alignment(8, ("inside/dense", "head")),
    )
    model = compiled(Growing())
    precision = apply(recipe, model)
    x, y = data()
    model.fit(x[:, :7], y, verbose=0)
    assert model.inside.one.compute_dtype == "bfloat16"
    assert model.inside.two.compute_dtype == "float32", "its author said so"
    assert model.head.compute_dtype == "float32"
    assert [padded.path for padded in precision.report.padded] == ["inside/dense", "head"]
    assert precision.report.not_padded == ()
    precision.restore()
    assert model.inside.one.compute_dtype == "float32"


@pytest.mark.parametrize("global_policy", [True, False])
def test_a_new_head_has_the_recipe_too(global_policy: bool) -> None:
    recipe = replace(WHOLE, float32_modules=("middle", "head"), compile=False)
    with apply(recipe) if global_policy else nullcontext() as first:
        model = net()
        model.pop()
        model.add(keras.layers.Dense(4, activation="softmax", name="head"))
        compiled(model)
        precision = first or apply(recipe, model)
        model.pop()
        model.add(keras.layers.Dense(4, activation="softmax", name="last"))
        with pytest.warns(AutoprecWarning, match="not applied.*'head'"):
            compiled(model, optimizer=keras.optimizers.SGD(0.5))
        assert precision.report.islands == ("middle", "last (activation)")
        assert [each.compute_dtype for each in model.layers] == ["float16", "float32", "float16"]
        x, y = data(96)
        assert model(x).dtype == tf.float32
        model.set_weights(net().get_weights())
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        assert precision.steps == 3
        precision.restore()
    for mine, theirs in zip(model.trainable_weights, by_hand(), strict=True):
        assert np.allclose(mine.numpy(), theirs, atol=2e-3)
    assert not any(
        isinstance(v, Hook) for each in (model, *model.layers) for v in vars(each).values()
    )


def test_an_island_that_never_comes_is_said_when_the_model_is_complete() -> None:
    model = compiled(Growing())
    apply(Recipe(policy=Policy.MIXED_BFLOAT16, float32_modules=("inside/gru",)), model)
    with pytest.raises(UsageError, match="inside/gru"):
        model(data()[0])
