"""Layers that models share, that others change, or that are used before there is a model."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import pytest

from autoprec.backends.keras.apply.method_hooks import Hook
from autoprec.backends.keras.surgeon import KerasSurgeon
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Recipe
from autoprec.errors import AutoprecWarning
from tests.backends.keras.keras_models import compiled, data, softmax_net

layers = keras.layers
BFLOAT16 = Recipe(policy=Policy.MIXED_BFLOAT16)
FLOAT16 = Recipe(policy=Policy.MIXED_FLOAT16)


def apply(recipe: Recipe, model: Any = None) -> Any:
    return KerasSurgeon().apply(recipe, model=model)


def two_with_one_encoder() -> tuple[Any, Any, Any]:
    encoder = keras.Sequential([layers.Input((8,)), layers.Dense(8, activation="relu")])
    inputs = keras.Input((8,))
    first = compiled(keras.Model(inputs, layers.Dense(4, activation="softmax")(encoder(inputs))))
    second = compiled(keras.Model(inputs, encoder(inputs)), loss="mse")
    return encoder.layers[0], first, second


@pytest.mark.parametrize("second_recipe", [BFLOAT16, FLOAT16])
@pytest.mark.parametrize("first_ends_first", [True, False])
def test_recipes_on_a_shared_layer_end_in_any_order(
    second_recipe: Recipe, first_ends_first: bool
) -> None:
    shared, *models = two_with_one_encoder()
    before = shared.dtype_policy
    x, y = data()
    precisions = [apply(BFLOAT16, models[0]), apply(second_recipe, models[1])]
    left = second_recipe if first_ends_first else BFLOAT16
    first, then = precisions if first_ends_first else reversed(precisions)
    first.restore()
    assert shared.compute_dtype == left.policy.compute_dtype.value
    assert shared.get_config()["dtype"]["config"]["name"] == "float32"
    unscaled = first_ends_first and second_recipe is FLOAT16  # the other model's, in float16
    said = pytest.warns(AutoprecWarning, match="the loss is not scaled")
    with said if unscaled else contextlib.nullcontext():
        models[0].fit(x, y, verbose=0)
    then.restore()
    assert shared.dtype_policy is before
    everything = [layer for model in models for layer in (model, *model._flatten_layers())]
    assert not any(
        isinstance(value, Hook) for layer in everything for value in vars(layer).values()
    )
    assert np.allclose(models[0](x), by_hand(models[0], x), rtol=0, atol=1e-6), "in float32 again"


def by_hand(model: Any, x: Any) -> Any:
    first, bias, last, end = model.get_weights()
    powers = np.exp(np.maximum(x @ first + bias, 0) @ last + end)
    return powers / powers.sum(axis=-1, keepdims=True)


def test_a_policy_that_someone_else_has_set_since_is_what_a_file_says(tmp_path: Any) -> None:
    model = keras.Sequential([layers.Input((8,)), *(layers.Dense(8) for _ in range(3))])
    precision = apply(BFLOAT16, model)
    model.layers[0].quantize("int8")
    model.layers[1].dtype_policy = "float64"
    said = [layer.get_config()["dtype"]["config"].get("name") for layer in model.layers[1:]]
    assert said == ["float64", "float32"]
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.layers[0].quantization_mode == "int8"
    precision.restore()
    assert model.layers[0].quantization_mode == "int8"
    assert model.layers[1].compute_dtype == "float64"


def test_what_prepares_data_is_float32_before_there_is_a_model() -> None:
    random = np.random.default_rng(0)
    x = random.normal(51000.0, 300.0, (64, 2)).astype("float32")
    batches = [x[:32], x[32:]]
    with apply(FLOAT16):
        by_array, by_batches = layers.Normalization(), layers.Normalization()
        by_array.adapt(x)
        by_batches.adapt(batches)
        encoded = layers.CategoryEncoding(2050, output_mode="one_hot")(np.array([2047, 2049]))
        model = compiled(keras.Sequential([layers.Input((2,)), by_array, layers.Dense(4)]))
        assert model.layers[1].compute_dtype == "float16"
        assert model.layers[0].compute_dtype == "float32"
    assert np.argmax(encoded, axis=-1).tolist() == [2047, 2049]
    expected = (x - x.mean(axis=0)) / x.std(axis=0)
    for layer in (by_array, by_batches):
        assert np.allclose(layer(x), expected, rtol=0, atol=1e-3)
        assert layer.get_config()["dtype"]["config"]["name"] == "float32"
    assert layers.Normalization().dtype_policy is keras.config.dtype_policy()


def test_inputs_are_described_as_they_were() -> None:
    model = softmax_net()
    before = model.to_json()
    apply(BFLOAT16, model)
    assert model.to_json() == before
