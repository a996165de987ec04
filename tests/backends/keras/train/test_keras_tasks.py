"""Tasks as users write them: their own optimizers, losses, policies and data types."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autoprec.backends import registry
from autoprec.backends.keras.backend import KerasBackend
from autoprec.backends.keras.surgeon import KerasSurgeon
from autoprec.backends.protocol import Task
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import LossScale, Recipe
from autoprec.core.speed.timing_budget import TimingBudget
from autoprec.errors import FrameworkMissing, TaskError, UsageError
from autoprec.tuning.proof.recipe_proof import Proof
from tests.backends.keras.keras_models import (
    Pair,
    Subclassed,
    Unscaled,
    compiled,
    data,
    softmax_net,
)

BFLOAT16 = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=8)
FLOAT16 = Recipe(policy=Policy.MIXED_FLOAT16, batch_size=8, loss_scale=LossScale(initial=2.0**10))
QUIET: Any = lambda *_: None  # noqa: E731


def task(build_model: Any, build_data: Any = lambda n: data(32), **more: Any) -> Task:
    return Task(name="task.py", build_model=build_model, build_data=build_data, **more)


def describe(given: Task) -> Any:
    return KerasBackend().describe(given, device="cpu", seed=0, batch_size=8, report=QUIET)


def tracer(given: Task) -> Any:
    return KerasBackend().tracer(given, device="cpu", seed=0, report=QUIET)


# A train_step with optimizers of its own ----------------------------------------------------------


def pair(norm: bool = False) -> Any:
    model = Pair(norm)
    model.compile(keras.optimizers.Adam(1e-3), keras.optimizers.Adam(1e-3))
    return model


def real(n: int) -> Any:
    return [data(n)[0] for _ in range(4)]


def test_the_gradients_of_several_optimizers_are_seen() -> None:
    traced = tracer(task(pair, real))
    traced.reference(batch_size=8, steps=2, checkpoints=(0, 1))
    for recipe in (BFLOAT16, FLOAT16):
        points = traced.compare_steps(recipe=recipe)
        assert [point.step for point in points] == [0, 1]
        for point in points:
            assert point.gradient_seen
            assert 1e-5 < point.gradient_error < 0.2


def test_a_gan_is_splittable_unless_it_normalises_over_the_batch() -> None:
    assert describe(task(pair, real)).splittable
    facts = describe(task(lambda: pair(norm=True), real))
    assert not facts.splittable
    assert "BatchNorm" in facts.split_reason


class ByHand(Subclassed):
    """Updates its weights without an optimizer."""

    def train_step(self, given: Any) -> Any:
        x, y = given
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        for variable, gradient in zip(self.trainable_variables, gradients, strict=True):
            variable.assign_sub(0.01 * gradient)
        return {"loss": loss}


def test_no_recorded_gradient_is_not_split_and_not_covered() -> None:
    given = task(lambda: compiled(ByHand()))
    facts = describe(given)
    assert not facts.splittable
    assert "reaches no optimizer" in facts.split_reason
    verdict = Proof(tracer(given), steps=5).prove(BFLOAT16, seeds=())
    assert any(what.startswith("gradients") for what in verdict.not_covered)
    seen = Proof(tracer(task(lambda: compiled(Subclassed()))), steps=5).prove(BFLOAT16, seeds=())
    assert not any(what.startswith("gradients") for what in seen.not_covered)


def test_a_train_step_that_never_scales_is_compared_unscaled() -> None:
    traced = tracer(task(lambda: compiled(Unscaled())))
    traced.reference(batch_size=8, steps=1, checkpoints=(0,))
    (point,) = traced.compare_steps(recipe=FLOAT16)
    assert 0 < point.gradient_error < 0.05


# Losses that layers add ---------------------------------------------------------------------------


class Encoder(keras.Model):
    """A small VAE: its own sampling, a KL term by add_loss, a regulariser on activations."""

    def __init__(self) -> None:
        super().__init__()
        layers = keras.layers
        self.hidden = layers.Dense(16, activation="relu", activity_regularizer="l2")
        self.mean, self.spread = layers.Dense(2), layers.Dense(2)
        self.out = layers.Dense(8)
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, x: Any) -> Any:
        hidden = self.hidden(x)
        mean, spread = self.mean(hidden), self.spread(hidden)
        kl = -0.5 * keras.ops.mean(1 + spread - keras.ops.square(mean) - keras.ops.exp(spread))
        self.add_loss(0.1 * kl)
        noise = keras.random.normal(keras.ops.shape(mean), dtype=mean.dtype, seed=self.seeds)
        return self.out(mean + noise * keras.ops.exp(0.5 * spread))


def vae() -> Any:
    return compiled(Encoder(), loss="mse", optimizer=keras.optimizers.SGD(0.01))


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize("eager", [False, True])
def test_a_model_with_add_loss_trains_as_in_float32(policy: str, built: bool, eager: bool) -> None:
    """Keras's own policy does not: it cannot add a 16-bit term to the float32 loss."""
    x = data(32)[0]

    def losses(model: Any) -> Any:
        history = model.fit(x, x, batch_size=8, epochs=2, shuffle=False, verbose=0)
        return history.history["loss"]

    def made() -> Any:
        keras.utils.set_random_seed(4)
        model = Encoder()
        model.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=eager)
        return model

    expected = losses(made())
    model = made()
    if built:
        seeds = model.seeds.state.numpy()
        model(x[:8])
        model.seeds.state.assign(seeds)
    KerasSurgeon().apply(Recipe(policy=Policy.parse(policy)), model=model)
    assert losses(model) == pytest.approx(expected, rel=2e-2)
    assert len(model.losses) == 2


def test_a_vae_is_described_timed_and_traced() -> None:
    given = task(vae, lambda n: (data(32)[0], data(32)[0]))
    assert describe(given).step_seconds > 0
    session = KerasBackend().open(given, BFLOAT16, device="cpu", seed=0, report=QUIET)
    assert session.time_steps(TimingBudget(seconds=0.1, min_steps=2, max_steps=3)).finite
    session.close()
    traced = tracer(given)
    traced.reference(batch_size=8, steps=1, checkpoints=(0,))
    (point,) = traced.compare_steps(recipe=BFLOAT16)
    assert 0 < point.gradient_error < 0.1


# What stays in float32 ----------------------------------------------------------------------------


def test_ids_and_large_numbers_reach_the_first_product_unrounded() -> None:
    layers = keras.layers
    ids = np.array([[1001], [1002], [1003]], "float32")

    def table() -> Any:
        return layers.Embedding(2000, 1, embeddings_initializer=lambda *_, **__: rows)

    rows = np.arange(2000, dtype="float32")[:, None] / 8
    nets = [
        keras.Sequential([layers.Input((1,)), layers.Reshape((1,)), table()]),
        keras.Sequential(
            [layers.Input((1,)), layers.Discretization(list(range(1, 1999))), table()]
        ),
        keras.Sequential(
            [layers.Input((1,)), layers.CategoryEncoding(2000, "multi_hot"), layers.Dense(4)]
        ),
        keras.Sequential(
            [layers.Input((1,)), layers.Normalization(mean=1000.0, variance=1.0), layers.Dense(4)]
        ),
    ]
    for net in nets:
        inner = keras.Model(net.inputs[0], net.layers[-2].output)
        expected = keras.ops.convert_to_numpy(inner(ids))
        precision = KerasSurgeon().apply(Recipe(policy=Policy.MIXED_BFLOAT16), model=net)
        assert np.array_equal(keras.ops.convert_to_numpy(inner(ids)), expected)
        assert net.layers[-1].compute_dtype == "bfloat16", "no product is lost"
        assert precision.report.kept


@pytest.mark.parametrize("form", ["in place", "global"])
def test_padding_is_masked_whatever_number_it_is(form: str) -> None:
    """bfloat16 rounds the padding to -7.3125, and -1.002 to the -1 that is padding elsewhere."""
    layers = keras.layers
    x = np.full((2, 3, 1), -1.002, "float32")
    x[0, 2] = -7.3

    def made(padding: float) -> Any:
        inputs = keras.Input((3, 1))
        return keras.Model(inputs, layers.LSTM(2)(layers.Masking(padding)(inputs)))

    def mask(model: Any) -> Any:
        return keras.ops.convert_to_numpy(model.layers[1](x)._keras_mask).tolist()

    for padding, kept in ((-7.3, [[True, True, False], [True] * 3]), (-1.0, [[True] * 3] * 2)):
        assert mask(made(padding)) == kept
        given = {"model": made(padding)} if form == "in place" else {}
        with KerasSurgeon().apply(Recipe(policy=Policy.MIXED_BFLOAT16), **given):
            model = given.get("model") or made(padding)
            assert np.isfinite(model(x)).all()
            assert mask(model) == kept
            assert model.layers[2].compute_dtype == "bfloat16"


def test_a_layer_its_author_made_float32_stays_and_one_from_a_file_is_no_such(
    tmp_path: Any,
) -> None:
    layers = keras.layers

    def net() -> Any:
        return compiled(
            keras.Sequential(
                [
                    layers.Input((8,)),
                    layers.Dense(8, name="a"),
                    layers.Dense(8, dtype="float32", name="mine"),
                    layers.Dense(8, name="b"),
                    layers.Dense(4, activation="softmax", name="c"),
                ]
            )
        )

    model = net()
    precision = KerasSurgeon().apply(Recipe(policy=Policy.MIXED_BFLOAT16), model=model)
    dtypes = [layer.compute_dtype for layer in model.layers]
    assert dtypes == ["bfloat16", "float32", "bfloat16", "bfloat16"]
    assert precision.report.kept == ("mine",)
    model.fit(*data(), verbose=0)
    model.save(tmp_path / "model.keras")
    base = keras.saving.load_model(tmp_path / "model.keras")
    head = layers.Dense(2, name="head")(base.layers[-2].output)
    tuned = keras.Model(base.inputs, head)
    KerasSurgeon().apply(Recipe(policy=Policy.MIXED_BFLOAT16), model=tuned)
    assert [layer.compute_dtype for layer in tuned.layers[1:]] == ["bfloat16"] * 4


def test_what_bidirectional_makes_and_one_mixed_layer_leave_the_others_to_the_profile() -> None:
    layers, mixed = keras.layers, keras.DTypePolicy("mixed_float16")
    model = keras.Sequential(
        [
            layers.Input((4, 8)),
            layers.Bidirectional(layers.LSTM(4, return_sequences=True)),
            layers.Bidirectional(layers.GRU(4, dtype="float32"), dtype="float32"),
            layers.LayerNormalization(dtype=mixed),
            layers.Dense(8, dtype="float32", name="mine"),
            *(layers.Dense(4) for _ in range(4)),
        ]
    )
    recipe = Recipe(policy=Policy.MIXED_BFLOAT16)
    with KerasSurgeon().apply(recipe, model=model) as precision:
        both = [(each.forward_layer, each.backward_layer) for each in model.layers[:2]]
        assert [[each.compute_dtype for each in pair] for pair in both] == [
            ["bfloat16"] * 2,
            ["float32"] * 2,
        ]
        others = [each.compute_dtype for each in model.layers[2:]]
        assert others == ["bfloat16", "float32", *["bfloat16"] * 4]
        assert "mine" in precision.report.kept


def test_a_model_whose_preparing_layer_alone_is_built_is_reached() -> None:
    normal = keras.layers.Normalization()
    normal.adapt(data()[0])
    model = keras.Sequential([normal, keras.layers.Dense(4)])
    with KerasSurgeon().apply(Recipe(policy=Policy.MIXED_BFLOAT16), model=model) as precision:
        assert not precision.warnings
        model(data()[0])
        assert model.layers[1].compute_dtype == "bfloat16"


def test_a_policy_the_task_sets_when_imported_holds_for_every_session() -> None:
    seen = []

    def build() -> Any:
        seen.append(keras.config.dtype_policy().name)
        return softmax_net()

    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        for _ in range(2):
            session = KerasBackend().open(
                task(build), Recipe(batch_size=8), device="cpu", seed=0, report=QUIET
            )
            session.close()
    finally:
        keras.config.set_dtype_policy("float32")
    assert seen == ["mixed_bfloat16"] * 2


# Each mistake has its sentence --------------------------------------------------------------------


def test_functions_that_keras_does_not_use_are_named() -> None:
    unused: Any = lambda *_: None  # noqa: E731
    facts = describe(
        task(softmax_net, loss_fn=unused, training_step=unused, build_optimizer=unused)
    )
    for name, place in (
        ("loss_fn", "compile(loss=...)"),
        ("training_step", "train_step"),
        ("build_optimizer", "compile(optimizer=...)"),
    ):
        assert any(
            note.startswith(f"{name} is not used") and place in note for note in facts.warnings
        )
    assert not any("not used" in note for note in describe(task(softmax_net)).warnings)


@pytest.fixture
def keras_2() -> Any:
    return type("Functional", (), {"__module__": "tf_keras.src.engine.functional"})()


def test_keras_2_is_named(keras_2: Any) -> None:
    for refused in (
        lambda: registry.owner(keras_2),
        lambda: describe(task(lambda: keras_2)),
    ):
        with pytest.raises(TaskError, match=r"Keras 2.*import keras instead of tf_keras"):
            refused()


def test_jax_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keras.config.backend", lambda: "jax")
    with pytest.raises(UsageError, match=r"Keras runs on 'jax'.*KERAS_BACKEND=tensorflow"):
        registry.load("keras")


def test_a_backend_that_is_not_installed_is_named() -> None:
    code = "from autoprec.backends import registry; registry.load('keras')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "KERAS_BACKEND": "jax"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert FrameworkMissing.__name__ in done.stderr.splitlines()[-1]
    assert "KERAS_BACKEND=tensorflow" in done.stderr.splitlines()[-1]
