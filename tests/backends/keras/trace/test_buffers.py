"""Weights that nothing trains: read by stable paths, and compared step by step with float32's."""

from __future__ import annotations

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from autoprec.backends.keras.backend import KerasBackend
from autoprec.backends.protocol import Task
from autoprec.core.dtypes import Policy
from autoprec.core.numerics.buffers import check_buffers
from autoprec.core.numerics.tolerance import Tolerance
from autoprec.core.recipe import Recipe

BF16 = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=16)


@keras.saving.register_keras_serializable("autoprec_tests")
class Sums(keras.layers.Layer):
    """Passes features on, and sums them up; `careful` keeps autocasting away from the sums."""

    def __init__(self, careful=False, **more):
        super().__init__(**more)
        self.careful = careful

    def build(self, shape):
        kept = {"initializer": "zeros", "trainable": False, "autocast": not self.careful}
        self.total = self.add_weight(shape=shape[-1:], name="total", **kept)
        self.squares = self.add_weight(shape=shape[-1:], name="squares", **kept)
        self.count = self.add_weight(shape=(), name="count", **kept)

    def call(self, inputs, training=False):
        if training:
            added = ops.sum(inputs, axis=0), ops.sum(ops.square(inputs), axis=0), 1.0
            for variable, value in zip((self.total, self.squares, self.count), added, strict=True):
                variable.assign(variable + ops.cast(value, variable.value.dtype))
        return inputs


class Held:
    """A plain object that keeps a variance, in the variables of the library below."""

    def __init__(self):
        self.variance = [tf.Variable(tf.ones(8))]
        self.generator = tf.random.Generator.from_seed(1)


class Variance(keras.layers.Layer):
    """Keeps the variance of its inputs where Keras does not look, and adds noise of its own."""

    def __init__(self, careful):
        super().__init__()
        self.careful, self.held = careful, Held()

    def call(self, inputs, training=False):
        if training:
            x = ops.cast(inputs, "float32") if self.careful else inputs
            variance = ops.mean(ops.square(x), axis=0) - ops.square(ops.mean(x, axis=0))
            kept = self.held.variance[0]
            kept.assign(0.9 * kept + 0.1 * ops.cast(variance, "float32"))
        noise = self.held.generator.normal(ops.shape(inputs))
        return inputs + 0.5 * ops.cast(noise, inputs.dtype)


def network(*layers, eager):
    def build():
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(16), *(f() for f in layers)]
        )
        model.add(keras.layers.Dense(4, dtype="float32"))
        model.compile(
            keras.optimizers.SGD(1e-2),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            run_eagerly=eager,
        )
        return model

    return build


def features():
    return keras.layers.Dense(8, bias_initializer=keras.initializers.Constant(10.0))


def batches(batch_size):
    random = np.random.default_rng(0)
    centres = random.normal(size=(4, 8))
    for _ in range(40):
        y = random.integers(0, 4, batch_size)
        yield (centres[y] + 0.7 * random.normal(size=(batch_size, 8))).astype("float32"), y


def tracer(*layers, eager):
    build_model = network(*layers, eager=eager)
    task = Task(name="task.py", build_model=build_model, build_data=batches)
    return KerasBackend().tracer(task, device="cpu", seed=0, report=lambda *_: None)


def compared(*layers, steps=9, eager=True):
    """What steps leave in buffers; few steps take less time than the making of a graph."""
    traced = tracer(*layers, eager=eager)
    traced.reference(batch_size=16, steps=steps, checkpoints=(2, steps - 1))
    return check_buffers(
        traced.compare_steps(recipe=BF16), traced.noise(draws=2), Tolerance()
    ), traced


@functools.cache
def compared_sums(careful):
    return compared(features, lambda: Sums(careful=careful))


def test_sums_that_autocasting_rounds_in_every_step_fail():
    found, _ = compared_sums(careful=False)
    assert "sums/total, sums/squares, sums/count are rounded to 16 bits" in found.problem


def test_sums_of_rounded_numbers_are_named_by_paths_that_every_build_has():
    found, traced = compared_sums(careful=True)
    assert found.passed
    assert set(found.rounded) == {"sums/total", "sums/squares"}
    (last,) = [p for p in traced.compare_steps(recipe=BF16) if p.step == 8]
    assert [each.name for each in last.buffers] == ["sums/total", "sums/squares", "sums/count"]


def test_batch_normalisation_is_compared_and_equal_and_dropouts_seeds_are_no_buffers():
    found, traced = compared(
        keras.layers.BatchNormalization,
        lambda: keras.layers.Dropout(0.2),
        lambda: keras.layers.Dense(8),
        keras.layers.BatchNormalization,
        eager=False,
    )
    assert found.judged
    assert found.problem == ""
    assert found.describe() == ""
    names = {each.name for p in traced.compare_steps(recipe=BF16) for each in p.buffers}
    assert names == {
        f"batch_normalization{number}/moving_{what}"
        for number in ("", "_1")
        for what in ("mean", "variance")
    }


def test_a_model_without_such_weights_is_not_judged():
    assert not compared(keras.layers.ReLU)[0].judged


@pytest.mark.parametrize("careful", [True, False])
def test_what_keras_does_not_list_is_compared_from_the_same_state_with_the_same_noise(careful):
    found, traced = compared(features, lambda: Variance(careful), eager=careful)
    assert found.judged
    assert found.passed == careful
    assert careful or "variance/held.variance[0]" in found.problem
    points = traced.compare_steps(recipe=BF16)
    assert {each.name for point in points for each in point.buffers} == {
        "variance/held.variance[0]"
    }
    assert all(point.gradient_error < 0.1 for point in points)


@pytest.mark.parametrize("careful", [True, False])
def test_a_step_that_is_compared_leaves_the_state_as_it_was(careful):
    _, traced = compared_sums(careful)
    first = traced.compare_steps(recipe=BF16)
    assert traced.compare_steps(recipe=BF16) == first
