"""What was traced before a profile was applied or taken back is traced again, or named."""

from __future__ import annotations

import gc
import warnings

import keras
import pytest
import tensorflow as tf

from autoprec import apply_profile
from autoprec.core.recipe import LossScale, Recipe
from autoprec.errors import AutoprecWarning
from tests.backends.keras.keras_models import compiled, data

layers = keras.layers
BFLOAT16 = Recipe("mixed_bfloat16", batch_size=8)
FLOAT16 = Recipe("mixed_float16", batch_size=8, loss_scale=LossScale(initial=64.0))
X, Y = data(16)


@keras.saving.register_keras_serializable(package="tests")
class RanIn(layers.Layer):
    """Keeps the number of bits that it ran in last."""

    def build(self, shape):
        self.bits = self.add_weight(shape=(), dtype="int32", trainable=False)

    def call(self, x):
        self.bits.assign(16 if "16" in keras.backend.standardize_dtype(x.dtype) else 32)
        return x


def net(width=4):
    return keras.Sequential(
        [layers.Input((8,)), layers.Dense(8), RanIn(), layers.Dense(width, "softmax")]
    )


def bits(model, run):
    """Return the bits that `run` computes in; a function that ran before is not traced anew."""
    (layer,) = (each for each in model._flatten_layers() if isinstance(each, RanIn))
    layer.bits.assign(0)
    run(model)
    return int(layer.bits.numpy())


WAYS = {
    "fit": lambda model: model.fit(X, Y, batch_size=8, verbose=0),
    "train_on_batch": lambda model: model.train_on_batch(X, Y),
    "evaluate": lambda model: model.evaluate(X, Y, verbose=0),
    "predict": lambda model: model.predict(X, verbose=0),
}


def said(run):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run()
    return [str(each.message) for each in found if each.category is AutoprecWarning]


@pytest.mark.parametrize("recipe", [BFLOAT16, FLOAT16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_model_that_ran_before_runs_by_the_profile_and_again_without_it(way, recipe):
    model, run = compiled(net()), WAYS[way]
    assert bits(model, run) == 32
    with apply_profile(recipe, model=model) as precision:
        assert bits(model, run) == 16
        assert precision.steps == {"fit": 2, "train_on_batch": 1}.get(way, 0)
        model.jit_compile = not model.jit_compile  # so that it is not put back as it was
    assert bits(model, run) == 32


def test_a_model_that_was_never_compiled_predicts_by_the_profile():
    model, predict = net(), WAYS["predict"]
    assert bits(model, predict) == 32
    with apply_profile(BFLOAT16, model=model):
        assert bits(model, predict) == 16
    assert bits(model, predict) == 32


@pytest.mark.parametrize("way", [way for way in WAYS if way != "fit"])  # train_on_batch's function
@pytest.mark.parametrize("applied_to", ["the model around it", "the model inside"])
def test_so_do_the_models_in_it_and_around_it(way, applied_to):
    inner, run = compiled(net(8)), WAYS[way]
    outer = compiled(keras.Sequential([layers.Input((8,)), layers.Dense(8), inner]))
    chosen = inner if applied_to == "the model inside" else outer
    models = (inner, outer)
    assert [bits(model, run) for model in models] == [32, 32]
    with apply_profile(BFLOAT16, model=chosen):
        assert [bits(model, run) for model in models] == [16, 16]
    assert [bits(model, run) for model in models] == [32, 32]


def test_the_scale_of_a_model_inside_is_looked_at_as_before():
    inner = compiled(net(8))
    outer = compiled(keras.Sequential([layers.Input((8,)), inner]))
    with apply_profile(FLOAT16, model=inner):
        before = inner.train_function
        with apply_profile(BFLOAT16, model=outer):
            assert inner.train_function is before
            inner.train_on_batch(X, Y)
            assert before.calls == 1
    assert inner.train_function is not before


class InTurns(keras.callbacks.Callback):
    """Applies a profile after the first epoch, and takes it back after the second."""

    def on_epoch_end(self, epoch, logs=None):
        if epoch == 0:
            self.precision = apply_profile(BFLOAT16, model=self.model)
        elif epoch == 1:
            self.precision.restore()
        self.seen = [*getattr(self, "seen", ()), int(self.model.layers[1].bits.numpy())]


def test_a_callback_may_apply_a_profile_and_take_it_back():
    model, turns = compiled(net()), InTurns()
    model.fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=[turns])
    assert turns.seen == [32, 16, 32]


def test_a_model_trained_before_the_policy_was_set_is_named_though_it_was_traced():
    model = compiled(net())
    WAYS["fit"](model)
    with apply_profile(BFLOAT16):
        (warning,) = said(lambda: WAYS["fit"](model))
    assert "made before apply_profile" in warning


def loop(model, optimizer):
    """A script's own step, compiled by tf.function; it has run once."""
    optimizer.build(model.trainable_variables)

    @tf.function
    def own_step(x, y):
        with tf.GradientTape() as tape:
            loss = keras.losses.sparse_categorical_crossentropy(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)

    own_step(tf.constant(X), tf.constant(Y))
    return own_step


class Trainer:
    """A script's own forward pass, as a method."""

    def __init__(self, model):
        self.model = model

    @tf.function
    def forward(self, x):
        return self.model(x, training=True)


def test_functions_of_the_script_that_were_traced_before_are_named():
    model = net()
    step, trainer = loop(model, keras.optimizers.SGD()), Trainer(model)
    trainer.forward(tf.constant(X))
    (warning,) = said(lambda: apply_profile(BFLOAT16, model=model).restore())
    assert "forward, own_step were traced by tf.function before the profile" in warning
    assert f"applied to {model.name}, and go on without it" in warning
    del step
    (warning,) = said(lambda: apply_profile(BFLOAT16, model=model).restore())
    assert warning.startswith("forward was traced by tf.function before")


def test_functions_of_other_models_and_those_traced_under_the_profile_are_not():
    model, other = compiled(net()), net()
    trainer, kept = Trainer(model), loop(other, keras.optimizers.SGD())
    for run in WAYS.values():
        run(model)

    def apply():
        with apply_profile(BFLOAT16, model=model):
            trainer.forward(tf.constant(X))

    assert said(apply) == []
    assert kept is not None


def test_a_function_that_is_gone_is_not_named_before_garbage_is_collected():
    model = net()
    gc.disable()
    try:
        cycle = [loop(model, keras.optimizers.SGD())]
        cycle.append(cycle)
        del cycle
        assert said(lambda: apply_profile(BFLOAT16, model=model).restore()) == []
    finally:
        gc.enable()
