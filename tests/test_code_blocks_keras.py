"""The Keras code of docs/ runs as it stands there; under a strategy on one replica.

tests/backends/keras/ has several.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autoprec import Policy, Recipe, apply_profile
from tests.code_blocks import block

#: What Keras itself warns about: numpy 2 reading TensorFlow's eager tensors.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

WriteProfile = Callable[[Recipe, str], Path]


@pytest.fixture
def names(write_profile: WriteProfile, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Everything that the page's code takes as given."""
    recipe = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=8)
    monkeypatch.chdir(write_profile(recipe, "keras").parent)
    inputs = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
    labels = (inputs.sum(axis=1) > 0).astype("int64")

    def build_model() -> keras.Model:
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    return {
        "tf": tf,
        "keras": keras,
        "apply_profile": apply_profile,
        "build_model": build_model,
        "x": inputs,
        "y": labels,
        "strategy": tf.distribute.MirroredStrategy(["CPU:0"]),
        "dataset": tf.data.Dataset.from_tensor_slices((inputs, labels)),
    }


def test_fit_under_a_strategy(names: dict[str, Any]) -> None:
    exec(block("docs/scale.md", 2), names)
    assert names["precision"].global_batch_size == 8
    assert names["precision"].steps == 4
    assert names["model"].layers[0].compute_dtype == "bfloat16"


def test_a_loop_of_ones_own_under_a_strategy(names: dict[str, Any]) -> None:
    exec(block("docs/scale.md", 3), names)
    assert names["precision"].steps == 4


def test_fit_and_a_loop_of_ones_own(
    write_profile: WriteProfile, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=32, accumulation_steps=2)
    monkeypatch.chdir(write_profile(recipe, "keras").parent)
    keras.utils.set_random_seed(0)
    names: dict[str, Any] = {}
    exec(block("docs/apply-keras.md", 0), names)
    try:
        assert names["model"].layers[0].compute_dtype == "bfloat16"
        assert names["model"].evaluate(names["x"], names["y"], verbose=0)[1] > 0.85
    finally:
        names["precision"].restore()
    names["model"] = keras.models.clone_model(names["model"])
    exec(block("docs/apply-keras.md", 1), names)
    predicted = np.argmax(names["model"].predict(names["x"], verbose=0), axis=1)
    assert (predicted == names["y"]).mean() > 0.85
    names["precision"].restore()
