"""Advice on mixed precision speaks of the user's own model, on the device that it trains on."""

from __future__ import annotations

import keras
import pytest

from autoprec.backends.keras.apply.dtype_policies import low_precision
from autoprec.backends.keras.apply.layer_names import layer_units
from autoprec.backends.keras.surgeon import KerasSurgeon
from autoprec.core.device.facts import DeviceFacts, DTypeFact
from autoprec.core.device.family import Support
from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.core.dtypes import DType, Policy
from autoprec.core.recipe import Recipe
from autoprec.errors import AutoprecWarning
from tests.backends.keras.keras_models import softmax_net

BF16 = Recipe(policy=Policy.MIXED_BFLOAT16)


def apply(recipe, model, **arguments):
    return KerasSurgeon().apply(recipe, model=model, **arguments)


def test_advice_names_what_will_not_pay():
    precision = apply(BF16, softmax_net(), device="cuda", facts=facts(bfloat16=8))
    text = " ".join(precision.warnings)
    assert "too small to benefit" in text
    assert "dense_2.units=4" in text
    assert "multiples of 8" in text


def facts(padding=True, support=Support.NATIVE, **alignments):
    """A device whose dtypes want these alignments."""
    dtypes = {
        DType(name): DTypeFact(support=support, alignment=multiple, best_alignment=2 * multiple)
        for name, multiple in alignments.items()
    }
    return DeviceFacts(Observation(DeviceKind.CUDA, 0), "family", "title", dtypes, padding=padding)


@pytest.mark.parametrize(
    ("given", "multiple"),
    [
        (facts(bfloat16=8, float16=16), "multiples of 8"),
        (facts(bfloat16=128), "multiples of 128"),
        (facts(bfloat16=4), None),
        (facts(float16=8), None),
        (facts(bfloat16=8, padding=False), None),
        (facts(bfloat16=8, support=Support.EMULATED), None),
        (None, None),
    ],
)
def test_the_alignment_is_that_of_the_device_s_facts_for_the_recipe_s_dtype(given, multiple):
    for device in ("cpu", "cuda", "tpu"):
        said = " ".join(apply(BF16, softmax_net(), device=device, facts=given).warnings)
        assert ("multiples of" in said) is (multiple is not None)
        assert multiple is None or multiple in said


def test_a_model_that_no_policy_reaches_is_named_once():
    def made(*dtypes):
        dense = [keras.layers.Dense(4, dtype=each) for each in dtypes]
        model = keras.Sequential([keras.layers.Input((8,)), *dense])
        model.compile("sgd", "mse")
        return model

    model = made("float64", "float64")
    with pytest.warns(AutoprecWarning, match="gains nothing by mixed_bfloat16.* is float64"):
        apply(BF16, model)
    model.compile("sgd", "mse")
    assert low_precision(layer_units(made("float64"))) == "policy float64: dense"
    apply(BF16, made("float64", "float32"))
