"""Operations by layer sum to the step's, each counted once; a layer without products has none."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from autoprec.backends.keras.apply.layer_names import layer_units
from autoprec.backends.keras.measure.step_graph import flops_by_unit, product_flops, trace_step

BATCH = 8
layers = keras.layers

#: A product of a batch with a 16 x 16 matrix.
PRODUCT = 2 * BATCH * 16 * 16


def sequential(name=None):
    return keras.Sequential([layers.Input((16,)), layers.Dense(16), layers.ReLU()], name=name)


def nested():
    inputs = keras.Input((16,))
    return keras.Model(inputs, layers.Dense(16)(sequential()(inputs)))


def shared():
    """One layer, and one model, called twice."""
    inputs, dense, inner = keras.Input((16,)), layers.Dense(16, name="shared"), sequential("inner")
    return keras.Model(inputs, inner(inner(dense(dense(inputs)))))


class Loop(keras.Model):
    """Layers in a list and a dict, called in loops of Python."""

    def __init__(self):
        super().__init__()
        self.blocks = [layers.Dense(16, name="first"), layers.Dense(16, name="second")]
        self.named = {"again": layers.Dense(16, name="again")}

    def call(self, x):
        for block in self.blocks:
            x = block(x)
        for _ in range(3):
            x = self.named["again"](x)
        return x


class Direct(Loop):
    """Layers whose `call` is called, as TimeDistributed does."""

    def build(self, shape):
        for block in (*self.blocks, self.named["again"]):
            block.build(shape)

    def call(self, x):
        for block in (*self.blocks, self.named["again"]):
            x = block.call(x)
        return x


def recomputed():
    with keras.RematScope(mode="full"):
        return Loop()


def over_time():
    return keras.Sequential(
        [
            layers.Input((16,)),
            layers.Reshape((4, 4)),
            layers.TimeDistributed(layers.Dense(4, name="each")),
            layers.Flatten(),
        ]
    )


def count(model):
    x = np.random.default_rng(0).normal(size=(BATCH, 16)).astype("float32")
    model(x)
    model.compile("sgd", "mse")
    batch = (tf.constant(x), tf.zeros((BATCH, 16)))
    step = trace_step(model, layer_units(model), batch)
    return flops_by_unit(step), sum(product_flops(operation) for operation in step.operations)


@pytest.mark.parametrize(
    ("make", "products"),
    [
        (nested, {"sequential/dense": 2, "dense": 3}),
        (shared, {"shared": 5, "inner/dense": 6}),
        (Loop, {"first": 2, "second": 3, "again": 9}),
        (Direct, {"first": 2, "second": 3, "again": 3}),
        # The forward pass of the whole model and of each layer is computed again.
        (recomputed, {"first": 5, "second": 5, "again": 15}),
        (over_time, {"time_distributed/each": 2 * 4 * 4 * 4 / 256}),
    ],
)
def test_the_parts_sum_to_the_step(make, products):
    counted, total = count(make())
    assert sum(counted.values()) == total
    assert {path: flops / PRODUCT for path, flops in counted.items()} == products
