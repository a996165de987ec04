"""docs/migration.md: its statements about TensorFlow and Keras hold, and its Keras code trains."""

from __future__ import annotations

import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autoprec import Policy, Recipe, apply_profile
from autoprec.core.recipe import LossScale
from tests.code_blocks import block

#: What Keras itself warns about: numpy 2 reading TensorFlow's eager tensors.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def test_the_graph_rewrite_is_gone_and_its_rest_refuses_keras_3() -> None:
    assert not hasattr(tf.train.experimental, "enable_mixed_precision_graph_rewrite")
    rewrite = tf.compat.v1.mixed_precision.enable_mixed_precision_graph_rewrite
    with pytest.raises(ValueError, match="must be an instance of"):
        rewrite(keras.optimizers.SGD())


def test_the_rewrite_option_is_still_accepted() -> None:
    before = tf.config.optimizer.get_experimental_options()
    try:
        tf.config.optimizer.set_experimental_options({"auto_mixed_precision": True})
        assert tf.config.optimizer.get_experimental_options()["auto_mixed_precision"]
    finally:
        tf.config.optimizer.set_experimental_options({"auto_mixed_precision": False, **before})


def test_the_experimental_policy_and_its_loss_scale_are_gone() -> None:
    assert not hasattr(keras.mixed_precision, "experimental")
    with pytest.raises(TypeError, match="loss_scale"):
        keras.mixed_precision.Policy("mixed_float16", loss_scale="dynamic")


def test_the_global_policy_has_two_names() -> None:
    before = keras.config.dtype_policy()
    try:
        keras.mixed_precision.set_global_policy("mixed_float16")
        assert keras.config.dtype_policy().name == "mixed_float16"
    finally:
        keras.config.set_dtype_policy(before)


def test_the_loss_scale_optimizer_changed_its_methods() -> None:
    scaled = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD())
    assert isinstance(scaled, keras.optimizers.LossScaleOptimizer)
    for gone in ("get_scaled_loss", "get_unscaled_gradients", "loss_scale"):
        assert not hasattr(scaled, gone)
    with pytest.raises(ValueError, match="loss_scale_factor"):
        keras.optimizers.LossScaleOptimizer(
            keras.optimizers.SGD(), dynamic=False, initial_scale=128
        )


def test_apply_gradients_unscales_by_itself() -> None:
    weight = keras.Variable([1.0])
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=1024.0)
    scaled.build([weight])
    assert float(scaled.dynamic_scale) == 1024.0
    with tf.GradientTape() as tape:
        loss = scaled.scale_loss(tf.reduce_sum(weight * 1.0))
    scaled.apply_gradients(zip(tape.gradient(loss, [weight]), [weight], strict=True))
    np.testing.assert_allclose(weight.numpy(), [0.5])


def test_a_fixed_loss_scale_factor_never_skips() -> None:
    weight = keras.Variable([1.0])
    optimizer = keras.optimizers.SGD(0.5, loss_scale_factor=128.0)
    optimizer.apply_gradients([(tf.constant([float("inf")]), weight)])
    assert not np.isfinite(weight.numpy()).all()


def small_model() -> keras.Sequential:
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])


def test_a_global_policy_set_after_building_changes_nothing() -> None:
    before = keras.config.dtype_policy()
    model = small_model()
    try:
        keras.config.set_dtype_policy("mixed_float16")
        assert model.layers[0].compute_dtype == "float32"
    finally:
        keras.config.set_dtype_policy(before)


def test_compile_wraps_the_optimizer_only_by_the_models_own_policy() -> None:
    model = small_model()
    for layer in model.layers:
        layer.dtype_policy = "mixed_float16"
    model.compile("sgd", "mse")
    assert not isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)

    before = keras.config.dtype_policy()
    try:
        keras.config.set_dtype_policy("mixed_float16")
        model = small_model()
        model.compile("sgd", "mse")
    finally:
        keras.config.set_dtype_policy(before)
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)


FLOAT16 = Recipe(policy=Policy.MIXED_FLOAT16, loss_scale=LossScale(initial=256.0))


def tuned(name: str, **arguments: Any) -> Any:
    """What the page's `apply_profile` does where the profile chose float16."""
    assert name == "model.profile.yaml"
    return apply_profile(FLOAT16, **arguments)


def one_step() -> dict[str, Any]:
    """Everything that the page's custom loop needs for one step."""
    model = small_model()
    model.set_weights([np.linspace(-1, 1, 8).reshape(4, 2), np.zeros(2)])
    return {
        "keras": keras,
        "tf": tf,
        "apply_profile": tuned,
        "model": model,
        "optimizer": keras.optimizers.SGD(0.1),
        "loss_fn": keras.losses.MeanSquaredError(),
        "x": np.linspace(0, 1, 32, dtype="float32").reshape(8, 4),
        "y": np.ones((8, 2), "float32"),
    }


def test_the_custom_loop_after_trains_as_a_plain_one() -> None:
    before, after = block("docs/migration.md", 4), block("docs/migration.md", 5)
    assert "get_unscaled_gradients" in before
    plain, scaled = one_step(), one_step()
    exec(after, scaled)
    assert scaled["precision"].steps == 1
    assert float(scaled["scaled_loss"]) == pytest.approx(256.0 * float(scaled["loss"]))
    plain["apply_profile"] = lambda name, **arguments: apply_profile("off", **arguments)
    start = plain["model"].get_weights()
    exec(after, plain)
    for mine, theirs, first in zip(
        scaled["model"].get_weights(), plain["model"].get_weights(), start, strict=True
    ):
        assert np.abs(theirs - first).min() > 1e-3
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-3)


def test_what_takes_the_place_of_the_graph_rewrite_applies() -> None:
    code = block("docs/migration.md", 3)
    then, first, second = re.split(r"^# (?:now|or).*$", code, flags=re.MULTILINE)
    assert "enable_mixed_precision_graph_rewrite" in then
    names = one_step() | {"build_model": small_model}
    exec(first.replace("optimizer, ...", "optimizer, 'mse'"), names)
    try:
        names["model"].fit(names["x"], names["y"], verbose=0)
        assert names["precision"].steps == 1
        assert names["model"].layers[0].compute_dtype == "float16"
    finally:
        names["precision"].restore()
    names["model"] = small_model()
    exec(second, names)
    assert names["model"].layers[0].compute_dtype == "float16"
