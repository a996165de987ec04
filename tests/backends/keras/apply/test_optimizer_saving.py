"""Files of a model with a recipe are those of a model without, and load where Keras is alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from autoprec.backends.keras.surgeon import KerasSurgeon
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import LossScale, Recipe
from tests.backends.keras.keras_models import compiled, data, eagerly, softmax_net

SCALED = Recipe(policy=Policy.MIXED_FLOAT16, loss_scale=LossScale(initial=64.0, growth_interval=2))
RECIPES = {
    "bfloat16": Recipe(policy=Policy.MIXED_BFLOAT16),
    "float16": SCALED,
    "accumulation": Recipe(accumulation_steps=2),
    "both": Recipe(SCALED.policy, loss_scale=SCALED.loss_scale, accumulation_steps=2),
}
X = np.linspace(-1, 1, 64, dtype="float32").reshape(8, 8)


def apply(recipe: Recipe, model: Any = None) -> Any:
    return KerasSurgeon().apply(recipe, model=model)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Path, str], Any]]:
    """Loads a file in a process that never heard of autoprec; one for all tests, which are many."""
    script = Path(__file__).parents[1] / "load_elsewhere.py"
    said = tmp_path_factory.mktemp("elsewhere") / "said"
    with (
        said.open("w") as errors,
        subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as child,
    ):
        asked, answers = child.stdin, child.stdout
        assert asked is not None
        assert answers is not None

        def load(path: Path, what: str) -> Any:
            print(json.dumps([str(path), what]), file=asked, flush=True)
            answer = answers.readline()
            assert answer, said.read_text()[-2000:]
            return json.loads(answer)

        yield load


def adam_net() -> Any:
    return softmax_net(optimizer=keras.optimizers.Adam(1e-2))


def trained(recipe: Recipe, before_build: bool = False) -> Any:
    if before_build:
        with apply(recipe):
            yield fitted(adam_net())
        return
    model = adam_net()
    apply(recipe, model)
    yield fitted(model)


def fitted(model: Any, traced: bool = False) -> Any:
    """Train an epoch; a step that is not traced makes the same variables in a tenth of the time."""
    if not traced:
        eagerly(model)
    x, y = data()
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    model.run_eagerly = False
    return model


def plain_outputs(model: Any) -> Any:
    """What `softmax_net` computes, in float32."""
    weights = iter(model.get_weights())
    x = np.maximum(X @ next(weights) + next(weights), 0)
    x = np.maximum(x @ next(weights) + next(weights), 0)
    powers = np.exp(x @ next(weights) + next(weights))
    return powers / powers.sum(axis=-1, keepdims=True)


def inner(model: Any) -> Any:
    optimizer = model.optimizer
    while hasattr(optimizer, "inner_optimizer"):
        optimizer = optimizer.inner_optimizer
    return optimizer


def state_of(model: Any) -> list[Any]:
    return [np.asarray(v.numpy()) for v in (*model.weights, *inner(model).variables)]


@pytest.mark.parametrize("form", ["model.keras", "model.weights.h5"])
@pytest.mark.parametrize("before_build", [False, True])
@pytest.mark.parametrize("name", ["float16", "both"])
def test_a_fresh_process_without_autoprec_goes_on(
    name: str, before_build: bool, form: str, elsewhere: Any, tmp_path: Path
) -> None:
    path = tmp_path / form
    for model in trained(RECIPES[name], before_build):
        model.save(path) if form.endswith(".keras") else model.save_weights(path)
        found = elsewhere(path, "load" if form.endswith(".keras") else "weights")
        assert found["autoprec"] is False
        assert found["optimizer"] == "Adam"
        assert found["iterations"] == (4 if name == "float16" else 2)
        sums = [v.sum() for v in state_of(model)[len(model.weights) + 2 :]]
        assert found["state"] == pytest.approx(sums, rel=1e-5)
        assert np.allclose(found["outputs"], plain_outputs(model), atol=1e-6)
        assert found["dtypes"] == ["float32"] * 3


@pytest.mark.parametrize("name", RECIPES)
def test_weights_go_from_plain_to_applied_and_back_with_the_optimizers_state(
    name: str, tmp_path: Path
) -> None:
    plain = fitted(adam_net())
    plain.save_weights(tmp_path / "plain.weights.h5")
    applied = adam_net()
    apply(RECIPES[name], applied)
    applied.optimizer.build(applied.trainable_variables)
    applied.load_weights(tmp_path / "plain.weights.h5")
    for mine, theirs in zip(state_of(applied), state_of(plain), strict=True):
        assert np.array_equal(mine, theirs)
    fitted(applied).save_weights(tmp_path / "applied.weights.h5")
    back = adam_net()
    back.optimizer.build(back.trainable_variables)
    back.load_weights(tmp_path / "applied.weights.h5")
    for mine, theirs in zip(state_of(applied), state_of(back), strict=True):
        assert np.array_equal(mine, theirs)


def test_a_loss_scale_goes_on_where_the_profile_is_applied_before_loading(tmp_path: Path) -> None:
    with apply(SCALED) as precision:
        model = fitted(adam_net(), traced=True)
        model.save(tmp_path / "model.keras")
        model.save_weights(tmp_path / "model.weights.h5")
        state = precision.state_dict()
        assert precision.scale == 64.0 * 4
        again = adam_net()
        again.optimizer.build(again.trainable_variables)
        again.load_weights(tmp_path / "model.weights.h5")
        assert state_of(again)[-1].tolist() == state_of(model)[-1].tolist()
        assert precision.model is again
        assert precision.state_dict()["loss_scales"][0] == state["loss_scales"][0]
        loaded = keras.saving.load_model(tmp_path / "model.keras")
        assert precision.model is loaded
        assert precision.state_dict()["loss_scales"][0] == state["loss_scales"][0]


@pytest.mark.parametrize("recipe", [SCALED, Recipe(policy=Policy.MIXED_BFLOAT16)])
def test_the_users_own_loss_scale_stays_in_their_files(
    recipe: Recipe, elsewhere: Any, tmp_path: Path
) -> None:
    own = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(1e-2), initial_scale=32.0)
    model = softmax_net(optimizer=own)
    precision = apply(recipe, model)
    fitted(model)
    model.save(tmp_path / "model.keras")
    found = elsewhere(tmp_path / "model.keras", "load")
    assert found["optimizer"] == "LossScaleOptimizer"
    assert found["iterations"] == 4
    sums = [v.sum() for v in state_of(model)[len(model.weights) + 2 :]]
    assert found["state"] == pytest.approx(sums, rel=1e-5)
    scale = precision.scale
    precision.restore()
    assert model.optimizer is own
    assert float(own.dynamic_scale.numpy()) == (scale if recipe is SCALED else 32.0)


def test_a_model_of_kerass_own_float16_policy_loads_with_its_state(
    elsewhere: Any, tmp_path: Path
) -> None:
    """Keras writes a loss scale's state for such a model, and looks for a plain optimizer's."""
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = adam_net()
    finally:
        keras.config.set_dtype_policy("float32")
    added = model.optimizer
    precision = apply(SCALED, model)
    fitted(model)
    model.save(tmp_path / "model.keras")
    found = elsewhere(tmp_path / "model.keras", "load")
    assert found["optimizer"] == "Adam"
    assert found["dtypes"] == ["float16"] * 3
    assert found["iterations"] == 4
    precision.restore()
    assert model.optimizer is added


@keras.saving.register_keras_serializable(package="tests")
class Scores(keras.layers.Layer):
    """A last layer that says nothing of a dtype, and takes none."""

    def __init__(self, classes: int, name: str | None = None) -> None:
        super().__init__(name=name)
        self.classes = classes

    def build(self, shape: Any) -> None:
        self.kernel = self.add_weight(shape=(shape[-1], self.classes))

    def call(self, x: Any) -> Any:
        return keras.ops.softmax(keras.ops.matmul(x, self.kernel))

    def get_config(self) -> dict[str, Any]:
        return {"classes": self.classes, "name": self.name}


def test_a_last_layer_without_a_dtype_in_its_config_loads(tmp_path: Path) -> None:
    inputs = keras.Input((8,))
    model = compiled(keras.Model(inputs, Scores(4)(keras.layers.Dense(8)(inputs))))
    apply(RECIPES["bfloat16"], model)
    fitted(model).save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for mine, theirs in zip(state_of(loaded), state_of(model), strict=True):
        assert np.array_equal(mine, theirs)
