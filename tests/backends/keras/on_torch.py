"""Run by test_keras_elsewhere in a process of its own: the backend with Keras on torch."""

from __future__ import annotations

import types

import keras
import numpy as np
import torch
from keras_models import compiled, data, softmax_net

from autoprec.backends.keras.backend import KerasBackend
from autoprec.backends.protocol import Task
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import LossScale, Recipe
from autoprec.core.speed.timing_budget import TimingBudget

torch.set_num_threads(1)
assert keras.config.backend() == "torch"

BACKEND = KerasBackend()
BF16 = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=8)
FP16 = Recipe(policy=Policy.MIXED_FLOAT16, batch_size=8, loss_scale=LossScale(initial=1024.0))


def apply(recipe, model):
    return BACKEND.surgeon().apply(recipe, model=model, optimizers=(), device="cpu")


def value_of(variable):
    return keras.ops.convert_to_numpy(variable.value)


def dtype(tensor):
    return keras.backend.standardize_dtype(tensor.dtype)


def surgery():
    x, y = data()
    model = softmax_net()
    model.fit(x, y, verbose=0)
    identities = [id(w) for w in model.weights]
    weights = model.get_weights()
    precision = apply(BF16, model)
    assert [id(w) for w in model.weights] == identities
    assert all(np.array_equal(a, b) for a, b in zip(weights, model.get_weights(), strict=True))
    assert dtype(model(x)) == "float32"
    assert precision.report.islands == ("dense_2 (activation)",)
    model.fit(x, y, verbose=0)
    assert precision.steps == 1
    precision.restore()
    assert dtype(model(x)) == "float32"
    assert {layer.compute_dtype for layer in model.layers} == {"float32"}


def loss_scale():
    model = softmax_net()
    precision = apply(FP16, model)
    x, y = data()
    model.fit(x, y, verbose=0)
    assert (precision.steps, precision.skipped, precision.scale) == (1, 0, 1024.0)
    loss_fn = keras.losses.SparseCategoricalCrossentropy()
    for inputs, changed in ((x, True), (np.full_like(x, 6e4), False)):
        model.zero_grad()
        precision.scale_loss(loss_fn(y, model(inputs, training=True))).backward()
        variables = model.trainable_variables
        with torch.no_grad():
            pairs = [(v.value.grad, v) for v in variables]
            assert precision.apply_gradients(pairs) is changed
    assert (precision.steps, precision.skipped, precision.scale) == (2, 1, 512.0)


class Average(keras.layers.Layer):
    """Keeps an average in a plain object, where Keras does not look for variables."""

    def __init__(self):
        super().__init__()
        self.held = types.SimpleNamespace(mean=keras.Variable(np.zeros(8), trainable=False))

    def call(self, x):
        self.held.mean.assign(keras.ops.mean(keras.ops.cast(x, "float32"), axis=0))
        return x


def skipped_steps():
    """A step that is skipped leaves no trace, neither in layers nor in what they hold."""
    average, norm = Average(), keras.layers.BatchNormalization()
    layers = [keras.layers.Input((8,)), average, norm, keras.layers.Dense(4)]
    model = compiled(keras.Sequential(layers), loss="mse")
    x, _ = data()
    with apply(FP16, model) as precision:
        model.train_on_batch(x, np.zeros((32, 4)))
        before = [value_of(v).copy() for v in (average.held.mean, norm.moving_mean)]
        model.train_on_batch(np.full_like(x, np.inf), np.zeros((32, 4)))
        assert precision.skipped == 1
    for variable, value in zip((average.held.mean, norm.moving_mean), before, strict=True):
        assert np.array_equal(value_of(variable), value)


def everything_else():
    given = Task(name="task.py", build_model=softmax_net, build_data=lambda n: data(32))
    quiet = lambda *_: None  # noqa: E731
    facts = BACKEND.describe(given, device="cpu", seed=0, batch_size=8, report=quiet)
    assert facts.splittable
    assert [unit.path for unit in facts.units] == ["dense", "dense_1", "dense_2"]
    assert "torch" in facts.software
    session = BACKEND.open(given, BF16, device="cpu", seed=0, report=quiet)
    measured = session.time_steps(TimingBudget(seconds=0.2, min_steps=3, max_steps=5))
    session.close()
    assert measured.samples_per_step == 8
    assert measured.finite
    tracer = BACKEND.tracer(given, device="cpu", seed=0, report=quiet)
    tracer.reference(batch_size=8, steps=2, checkpoints=(0, 1))
    for point in tracer.compare_steps(recipe=BF16):
        assert 0 < point.gradient_error < 0.1
    assert list(BACKEND.devices()) == ["cpu"]


def accumulation():
    x, y = data(32)
    keras.utils.set_random_seed(0)
    model = compiled(softmax_net())
    precision = apply(Recipe(accumulation_steps=2), model)
    model.fit(x, y, batch_size=8, verbose=0)
    assert precision.steps == 2


if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    surgery()
    loss_scale()
    accumulation()
    skipped_steps()
    everything_else()
    print("all of it held")
