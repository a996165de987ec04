"""A first loss that no training can begin with is the user's error, and where it comes from."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from autoprec.backends.keras.backend import KerasBackend
from autoprec.backends.protocol import Task
from autoprec.errors import TaskError


def arrays(count: int = 16) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(0)
    return (
        numbers.standard_normal((count, 4)).astype("float32"),
        numbers.standard_normal((count, 1)).astype("float32"),
    )


def net(*layers, loss="mse"):
    inputs = keras.Input((4,))
    x = keras.layers.Dense(8, name="first")(inputs)
    for layer in layers:
        x = layer(x)
    model = keras.Model(inputs, keras.layers.Dense(1, name="last")(x))
    model.compile("adam", loss)
    return model


def said(data, build_model=net):
    with pytest.raises(TaskError) as raised:
        describe(data, build_model)
    return str(raised.value)


def describe(data, build_model=net):
    task = Task(name="task.py", build_model=build_model, build_data=lambda count: [data])
    return KerasBackend().describe(
        task, device="cpu", seed=0, batch_size=16, report=lambda *_: None
    )


@keras.saving.register_keras_serializable()
class Logarithm(keras.layers.Layer):
    def call(self, inputs):
        return keras.ops.log(keras.ops.abs(inputs) - keras.ops.abs(inputs))


def test_a_good_first_loss_passes():
    assert describe(arrays()).samples == 16


def test_nan_in_the_data_is_named_with_its_sample():
    inputs, targets = arrays()
    inputs[5, 2] = np.nan
    text = said((inputs, targets))
    assert "the loss of the first batch is nan" in text
    assert "1 of 64 numbers that are inf or NaN in array 0" in text
    assert "first in sample 5" in text
    inputs, targets = arrays()
    targets[3] = np.inf
    assert "in array 1 of a batch (counted from 0, inputs first), first in sample 3" in said(
        (inputs, targets)
    )


def test_a_layer_that_makes_inf_is_named():
    text = said(arrays(), lambda: net(Logarithm(name="logarithm")))
    assert "logarithm (Logarithm) is the first layer that returns inf or NaN" in text


def test_a_loss_that_makes_inf_is_told_apart():
    def loss(targets, outputs):
        return keras.ops.log(outputs * 0.0)

    assert "so the loss itself makes it" in said(arrays(), lambda: net(loss=loss))


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (lambda targets, outputs: keras.ops.stop_gradient(outputs) + 0 * outputs, "moves no"),
        (lambda targets, outputs: keras.ops.sqrt(0 * outputs), "gradient by last/"),
    ],
)
def test_a_gradient_that_moves_nothing_or_everything_to_nan_is_an_error(loss, why):
    assert why in said(arrays(), lambda: net(loss=loss))
