"""A backward pass's range, and that of float16's numbers, are read from the graph of a step."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from autoprec.backends.keras.backend import KerasBackend
from autoprec.backends.keras.trace.magnitudes import exponents_of
from autoprec.backends.protocol import Task
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import LossScale, Recipe
from tests.backends.keras.keras_models import compiled, data, softmax_net

FLOAT32 = Recipe(batch_size=8)
BF16 = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=8)


def tracer(build_model=softmax_net, build_data=lambda n: data(64), **more):
    given = Task(name="task.py", build_model=build_model, build_data=build_data, **more)
    return KerasBackend().tracer(given, device="cpu", seed=0, report=lambda *_: None)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(("factor", "fits"), [(1000.0, True), (100_000.0, False)])
def test_float16_steps_say_how_large_the_forward_pass_gets(factor, fits, sign):
    def model():
        up = keras.layers.Lambda(lambda x: x * 100.0 * (factor / 100.0))
        scaled = [up, keras.layers.Lambda(lambda x: x * (1.0 / factor))]
        last = keras.layers.Dense(4, activation="softmax")
        return compiled(keras.Sequential([keras.layers.Input((8,)), *scaled, last]))

    ones = np.full((64, 8), sign, "float32"), np.zeros(64, "int32")
    traced = tracer(model, build_data=lambda n: ones)
    traced.reference(batch_size=8, steps=2, checkpoints=(0, 1))
    float16 = Recipe(Policy.MIXED_FLOAT16, 8, loss_scale=LossScale(initial=2.0**10))
    points = traced.compare_steps(recipe=float16)
    assert [point.step for point in points] == [0, 1]
    for point in points:
        assert point.overflowed is not fits
        assert point.largest == (factor if fits else None)
    assert all(point.largest is None for point in traced.compare_steps(recipe=BF16))


def test_exponents_are_those_of_numpy():
    assert exponents_of(np.array([0.0, 4.0, -3.0, np.inf, 2.0**-30])).tolist() == [2, 1, -30]


def regression(factor):
    """One linear layer whose upstream gradient is known: d loss / d y = factor / samples."""

    def model():
        net = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1, use_bias=False)])
        return compiled(net, loss=lambda y, p: keras.ops.mean(p) * factor)

    return model


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("exponent", [-20, 0, 12])
def test_the_largest_backward_magnitude_is_found_exactly(exponent, sign):
    inputs, targets = np.full((8, 2), 0.25, "float32"), np.zeros((8, 1), "float32")
    traced = tracer(regression(sign * 2.0**exponent), lambda n: [(inputs, targets)])
    found = traced.backward_exponents(recipe=BF16, batches=2)
    assert found.largest == exponent - 2  # the kernel's gradient: 8 x (factor / 8) x 0.25
    assert found.counts == {str(exponent - 2): 1.0}
    assert found.batches == 2
    assert found.finite


def amplified(loop=1.0, layer=1.0):
    """A recurrent net whose gradients are so many times as large in its loop, or in a layer."""

    class Cell(keras.layers.SimpleRNNCell):
        def call(self, inputs, states, training=False):
            output, states = super().call(inputs, states, training=training)
            return (output / loop) * loop, states

    class Amplified(keras.layers.Layer):
        def call(self, x):
            return (x / layer) * layer

    return lambda: compiled(
        keras.Sequential(
            [
                keras.layers.Input((3, 4)),
                keras.layers.RNN(Cell(4), name="loop"),
                Amplified(name="layer"),
                keras.layers.Dense(4, activation="softmax", name="dense"),
            ]
        )
    )


@pytest.mark.parametrize("where", ["loop", "layer"])
def test_large_gradients_inside_functional_code_and_loops_are_seen(where):
    inputs = np.random.default_rng(0).normal(size=(8, 3, 4)).astype("float32")

    def seen(factor):
        model = amplified(**{where: factor})
        traced = tracer(model, lambda n: [(inputs, np.zeros(8, "int32"))])
        found = traced.backward_exponents(recipe=BF16, batches=1).largest
        return found, {unit.path: unit for unit in traced.unit_magnitudes(recipe=BF16)}

    small, units = seen(2.0**6)
    large, larger = seen(2.0**12)
    assert (small, large) == (units[where].backward_largest, larger[where].backward_largest)
    assert {"loop", "layer", "dense"} <= set(units)
    for path, unit in units.items():
        grown = 6 if path == where else 0
        assert larger[path].backward_largest == unit.backward_largest + grown
        assert larger[path].forward_largest == unit.forward_largest
        assert (unit.underflow, larger[path].underflow) == (0.0, 0.0)
    assert units["dense"].forward_largest < 0, "the exponent of a chance below 1"
    assert units["dense"].backward_largest < 0


def test_an_infinite_backward_pass_is_reported():
    class Infinite(keras.layers.Layer):
        def call(self, x):
            return keras.ops.sqrt(x * 0.0)

    def model():
        net = keras.Sequential(
            [keras.layers.Input((8,)), keras.layers.Dense(4), Infinite(), keras.layers.Dense(1)]
        )
        return compiled(net, loss="mse")

    build = lambda n: [(np.ones((8, 8), "float32"), np.ones((8, 1), "float32"))]  # noqa: E731
    assert not tracer(model, build).backward_exponents(recipe=BF16, batches=1).finite


@pytest.mark.parametrize("exponent", [-12, 0, 12])
def test_float16_steps_say_how_large_the_backward_pass_gets_without_its_scale(exponent):
    inputs = np.full((8, 2), 0.25, "float32")
    build = lambda n: [(inputs, np.zeros((8, 1), "float32"))]  # noqa: E731
    traced = tracer(regression(2.0**exponent), build)
    traced.reference(batch_size=8, steps=2, checkpoints=(0, 1))
    for scale in (-4.0, 2.0):
        initial = LossScale(initial=2.0**scale)
        for point in traced.compare_steps(
            recipe=Recipe(Policy.MIXED_FLOAT16, 8, loss_scale=initial)
        ):
            assert point.backward == 2.0 ** (exponent - 2)  # as in the bfloat16 pass below
    beyond = Recipe(Policy.MIXED_FLOAT16, 8, loss_scale=LossScale(initial=2.0**40))
    if exponent > -12:
        assert [point.backward for point in traced.compare_steps(recipe=beyond)] == [None, None]
    assert all(point.backward is None for point in traced.compare_steps(recipe=BF16))


def test_magnitudes_are_read_under_the_same_dropout_as_losses():
    def model():
        whole = keras.layers.Dense(8, use_bias=False, kernel_initializer="identity")
        dropped = keras.layers.Dropout(0.5)
        last = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        net = keras.Sequential([keras.layers.Input((8,)), whole, dropped, last])
        net.compile(keras.optimizers.SGD(0.0), loss=lambda y, p: keras.ops.mean(p))
        return net

    powers = 2.0 ** np.arange(8, dtype="float32")[None]
    traced = tracer(model, lambda n: [(powers, np.zeros((1, 1), "float32"))])
    steps = range(5)
    traced.reference(batch_size=1, steps=len(steps), checkpoints=tuple(steps))
    float16 = Recipe(Policy.MIXED_FLOAT16, 1, loss_scale=LossScale(initial=1.0))
    points = traced.compare_steps(recipe=float16)
    assert len({point.reference for point in points}) > 2
    for point in points:  # the sum of what is left, or else the largest of what went in
        assert point.loss == point.reference
        assert point.largest == max(point.reference, 128.0)
