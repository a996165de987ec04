"""Models that share layers with one under a profile give float32, made before it or after."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import keras
import numpy as np
import pytest

from autoprec import apply_profile
from autoprec.backends.keras.apply.method_hooks import Hook
from autoprec.core.recipe import LossScale, Recipe

layers = keras.layers
BFLOAT16 = Recipe("mixed_bfloat16", batch_size=4)
FLOAT16 = Recipe("mixed_float16", batch_size=4, loss_scale=LossScale(initial=64.0))
X = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")


def autoencoder() -> tuple[Any, Any]:
    """Return the encoder, and the model that is trained: two graphs over the same layers."""
    inputs = keras.Input((6,))
    code = layers.Dense(3, name="code")(layers.Dense(8, "relu", name="hidden")(inputs))
    model = keras.Model(inputs, layers.Dense(6)(layers.Dense(8, "relu")(code)))
    model.compile("sgd", "mse")
    return keras.Model(inputs, code), model


class Encoder(keras.Model):
    """Made of another model's layers."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.parts = [model.get_layer("hidden"), model.get_layer("code")]

    def call(self, x: Any) -> Any:
        for part in self.parts:
            x = part(x)
        return x


def by_graph(model: Any) -> Any:
    return keras.Model(model.inputs[0], model.get_layer("code").output)


def several(model: Any) -> Any:
    return keras.Model(model.inputs[0], {each.name: each.output for each in model.layers[1:]})


def sequential(model: Any) -> Any:
    return keras.Sequential([keras.Input((6,)), *model.layers[1:3]])


MAKERS = {"graph": by_graph, "several": several, "sequential": sequential, "subclass": Encoder}


def dtypes(model: Any) -> set[str]:
    """Return the dtypes of what a model gives when it is called and when it predicts."""
    given = (model(X), model(X, training=True), model.predict(X, verbose=0))
    return {keras.backend.standardize_dtype(t.dtype) for t in keras.tree.flatten(given)}


def test_a_model_made_while_another_one_has_a_profile_gives_float32_from_its_first_call_on() -> (
    None
):
    """The other profile waits for the first call of every new model: it may share layers."""
    with apply_profile(BFLOAT16, model=autoencoder()[1]):
        encoder, model = autoencoder()
        with apply_profile(BFLOAT16, model=model):
            assert dtypes(encoder) == dtypes(encoder) == {"float32"}
        assert not any(isinstance(vars(each).get("call"), Hook) for each in (encoder, model))


class Own(keras.Model):
    """Of a graph: Keras makes it a Functional while it is made, which is what has its `call`."""


def test_a_graph_of_ones_own_class_made_while_a_profile_is_alive_is_called_as_it_is() -> None:
    with apply_profile(BFLOAT16, model=autoencoder()[1]) as precision:
        inputs = keras.Input((6,))
        inner = Own(inputs, layers.Dense(2)(inputs))
        outer = Own(inputs, layers.Dense(1)(inner(inputs)))
        third = Own(inputs, layers.Dense(1)(inner(inputs)))
        with apply_profile(BFLOAT16, model=outer):
            assert dtypes(inner) == dtypes(third) == dtypes(outer) == {"float32"}
        assert precision.model is not outer
    assert dtypes(inner) == dtypes(third) == {"float32"}


@pytest.mark.parametrize("recipe", [BFLOAT16, FLOAT16], ids=["bfloat16", "float16"])
def test_an_encoder_gives_float32_that_was_computed_in_16_bits(recipe: Recipe) -> None:
    encoder, model = autoencoder()
    exact = encoder.predict(X, verbose=0)
    with apply_profile(recipe, model=model):
        assert dtypes(encoder) == {"float32"}
        rounded = encoder.predict(X, verbose=0)
        model.fit(X, X, batch_size=4, verbose=0)
        assert dtypes(encoder) == {"float32"}
        model.compile("adam", "mse")
        assert dtypes(encoder) == {"float32"}
        assert model.get_layer("hidden").compute_dtype == recipe.policy.compute_dtype
    assert not np.array_equal(exact, rounded)
    np.testing.assert_allclose(exact, rounded, atol=0.05)
    assert "call" not in vars(encoder)


@pytest.mark.parametrize("kind", MAKERS)
def test_a_model_that_is_made_of_the_trained_ones_layers_gives_float32(kind: str) -> None:
    _, model = autoencoder()
    before = MAKERS[kind](model)
    with apply_profile(BFLOAT16, model=model):
        model.fit(X, X, batch_size=4, verbose=0)
        after = MAKERS[kind](model)
        assert dtypes(before) == dtypes(after) == {"float32"}
    exact = keras.tree.flatten(after.predict(X, verbose=0))
    for one, other in zip(keras.tree.flatten(before.predict(X, verbose=0)), exact, strict=True):
        np.testing.assert_array_equal(one, other)
    assert "call" not in vars(before)
    assert "call" not in vars(after)


def test_inside_another_model_it_stays_in_16_bits_and_what_shares_nothing_is_left_alone() -> None:
    encoder, model = autoencoder()
    with apply_profile(BFLOAT16, model=model):
        inputs = keras.Input((6,))
        outer = keras.Model(inputs, layers.Dense(2)(encoder(inputs)))
        seen = []
        encoder.layers[-1].call = _noting(encoder.layers[-1].call, seen)
        assert dtypes(outer) == {"float32"}
        assert {keras.backend.standardize_dtype(each.dtype) for each in seen} == {"bfloat16"}
        other = keras.Sequential([keras.Input((6,)), layers.Dense(2)])
        other(X)
        assert "call" not in vars(other)


def _noting(call: Any, seen: list[Any]) -> Any:
    def noting(*args: Any, **kwargs: Any) -> Any:
        seen.append(call(*args, **kwargs))
        return seen[-1]

    return noting


def test_none_of_them_is_kept() -> None:
    _, model = autoencoder()
    with apply_profile(BFLOAT16, model=model):
        made = []
        for _ in range(3):
            features = by_graph(model)
            features(X)
            made.append(weakref.ref(features))
        del features
        gc.collect()
        assert [each() for each in made] == [None, None, None]
