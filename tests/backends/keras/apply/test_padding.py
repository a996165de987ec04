"""Padding changes sizes at compute time only: same function, same gradients, same checkpoints."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoprec.backends.keras.apply.layer_names import layer_units
from autoprec.backends.keras.apply.method_hooks import InstalledHooks
from autoprec.backends.keras.apply.padding import pad_layers, padding_obstacle
from autoprec.backends.keras.surgeon import KerasSurgeon
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Alignment, Recipe
from tests.backends.keras.keras_models import compiled, data, softmax_net

sizes = st.integers(1, 11)
few = settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def outcome(layer, inputs):
    """The layer's output, and the gradients of a fixed combination of it."""
    floating = inputs.dtype.kind == "f"
    x = tf.constant(inputs)
    with tf.GradientTape() as tape:
        tape.watch(x)
        result = layer(x, x) if isinstance(layer, keras.layers.MultiHeadAttention) else layer(x)
        weights = tf.reshape(tf.cos(tf.range(tf.size(result), dtype=tf.float64)), result.shape)
        loss = tf.reduce_sum(tf.cast(result, tf.float64) * weights)
    sources = [*[v.value for v in layer.trainable_variables], *([x] if floating else [])]
    gradients = [tf.convert_to_tensor(g).numpy() for g in tape.gradient(loss, sources)]
    return [result.numpy(), *gradients]


def same_when_padded(make, inputs, multiple, dtype, tolerance):
    layer = make(dtype)
    if inputs.dtype.kind == "f":
        inputs = inputs.astype(dtype)
    plain = outcome(layer, inputs)
    identities = [id(v) for v in layer.variables]
    hooks = InstalledHooks()
    units = layer_units(layer)
    paths = [unit.path for unit in units if not padding_obstacle(unit, multiple)]
    pad_layers(units, Alignment(multiple, tuple(paths)), hooks)
    padded = outcome(layer, inputs)
    hooks.restore()
    assert [id(v) for v in layer.variables] == identities
    for one, other in zip(plain, padded, strict=True):
        assert one.shape == other.shape
        scale = max(1.0, float(np.abs(one).max(initial=0.0)))
        assert np.abs(one - other).max(initial=0.0) <= tolerance * scale
    return paths


TOLERANCES = [("float64", 1e-12), ("float32", 1e-6)]


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@given(batch=sizes, inputs=sizes, units=sizes, multiple=st.sampled_from([4, 8]))
@few
def test_dense(dtype, tolerance, batch, inputs, units, multiple):
    x = np.random.default_rng(0).normal(size=(batch, inputs))
    same_when_padded(
        lambda d: keras.layers.Dense(units, activation="tanh", dtype=d),
        x,
        multiple,
        dtype,
        tolerance,
    )


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@given(
    channels=sizes,
    filters=sizes,
    kernel=st.integers(1, 3),
    strides=st.integers(1, 2),
    padding=st.sampled_from(["same", "valid"]),
)
@few
def test_convolution(dtype, tolerance, channels, filters, kernel, strides, padding):
    x = np.random.default_rng(0).normal(size=(2, 6, 5, channels))
    same_when_padded(
        lambda d: keras.layers.Conv2D(filters, kernel, strides, padding, dtype=d),
        x,
        8,
        dtype,
        tolerance,
    )


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@given(rows=st.integers(2, 20), width=sizes)
@few
def test_embedding(dtype, tolerance, rows, width):
    indices = np.random.default_rng(0).integers(0, rows, (3, 4))
    same_when_padded(
        lambda d: keras.layers.Embedding(rows, width, dtype=d), indices, 8, dtype, tolerance
    )


@pytest.mark.parametrize(("dtype", "tolerance"), TOLERANCES)
@given(heads=st.integers(1, 3), width=st.integers(1, 5), features=sizes)
@settings(few, max_examples=3)
def test_attention(dtype, tolerance, heads, width, features):
    x = np.random.default_rng(0).normal(size=(2, 3, features))
    same_when_padded(
        lambda d: keras.layers.MultiHeadAttention(heads, width, dtype=d), x, 8, dtype, tolerance
    )


def test_attentions_projections_are_padded():
    x = np.zeros((2, 3, 6), "float32")
    paths = same_when_padded(
        lambda d: keras.layers.MultiHeadAttention(2, 5, dtype=d), x, 8, "float32", 1e-6
    )
    assert paths == ["query", "key", "value", "attention_output"]


def test_what_cannot_be_padded_says_why():
    class Own(keras.layers.Dense):
        def call(self, inputs):
            return super().call(inputs)

    model = keras.Sequential(
        [
            keras.layers.Input((6, 6, 4)),
            keras.layers.Conv2D(6, 3, groups=2, name="grouped"),
            keras.layers.Flatten(),
            keras.layers.Dense(5, name="router"),
            Own(5, name="own"),
            keras.layers.Dense(8, name="fine"),
            keras.layers.Dense(8, name="aligned"),
        ]
    )
    paths = ("grouped", "router", "own", "fine", "aligned", "flatten", "absent")
    done, skipped = pad_layers(layer_units(model), Alignment(8, paths), InstalledHooks())
    assert [(p.path, p.sizes) for p in done] == [("fine", (("inputs", 5, 8), ("units", 8, 8)))]
    reasons = dict(skipped)
    assert "2 groups" in reasons["grouped"]
    assert "router" in reasons["router"]
    assert "own way" in reasons["own"]
    assert "already" in reasons["aligned"]
    assert "not Flatten" in reasons["flatten"]
    assert "no layer of that name" in reasons["absent"]


@pytest.mark.parametrize("policy", [Policy.FLOAT32, Policy.MIXED_BFLOAT16])
def test_training_padded_is_training_and_checkpoints_go_both_ways(policy, tmp_path):
    def build():
        keras.utils.set_random_seed(1)
        return softmax_net(features=7, classes=5)

    x, y = data(32, 7, 5)
    plain, padded = build(), build()
    alignment = Alignment(8, ("dense", "dense_2"))
    KerasSurgeon().apply(Recipe(policy=policy), model=plain)
    precision = KerasSurgeon().apply(Recipe(policy=policy, alignment=alignment), model=padded)
    assert [p.path for p in precision.report.padded] == ["dense", "dense_2"]
    losses = [
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history["loss"][0]
        for model in (plain, padded)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6 if policy is Policy.FLOAT32 else 1e-2)
    assert [w.path for w in plain.weights] != []
    assert [w.shape for w in plain.weights] == [w.shape for w in padded.weights]
    padded.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    for a, b in zip(
        padded.weights + padded.optimizer.variables,
        loaded.weights + loaded.optimizer.variables,
        strict=True,
    ):
        assert np.array_equal(np.asarray(a.numpy()), np.asarray(b.numpy()))
    precision.restore()
    assert "call" not in vars(padded.layers[0])


def test_a_padded_output_layer_still_ends_in_float32():
    model = compiled(softmax_net(classes=5))
    KerasSurgeon().apply(
        Recipe(policy=Policy.MIXED_BFLOAT16, alignment=Alignment(8, ("dense_2",))), model=model
    )
    sums = keras.ops.convert_to_numpy(model(data()[0])).sum(axis=-1)
    assert np.abs(sums - 1).max() < 1e-6
