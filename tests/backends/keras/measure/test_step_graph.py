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


def attending():
    """Attention over four places of four features, behind a layer: three products each."""
    inputs = keras.Input((16,))
    places = layers.Reshape((4, 4))(layers.Dense(16, name="first")(inputs))
    attended = layers.MultiHeadAttention(2, 2, name="attention")(places, places)
    return keras.Model(inputs, layers.GroupNormalization(2)(attended))


class Forces(Loop):
    """Trains on the gradient of what it gives: each layer has products of second order."""

    def train_step(self, given):
        x, y = given
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                energy = tf.reduce_sum(tf.square(self.blocks[1](tf.tanh(self.blocks[0](x)))))
            loss = tf.reduce_mean(tf.square(inner.gradient(energy, x) - y))
        gradients = outer.gradient(loss, self.trainable_variables[:4])
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables[:4], strict=True))
        return {"loss": loss}


def count(model):
    x = np.random.default_rng(0).normal(size=(BATCH, 16)).astype("float32")
    model.compile("sgd", "mse")
    batch = (tf.constant(x), tf.zeros_like(model(x)))
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
        (
            attending,
            {
                "first": 2,
                "attention": 3 * 2 * 2 * 4 * 4 * 2 / 256,
                **{
                    f"attention/{part}": 3 * 4 * 4 * 4 / 256
                    for part in ("query", "key", "value", "attention_output")
                },
            },
        ),
    ],
)
def test_the_parts_sum_to_the_step(make, products):
    counted, total = count(make())
    assert sum(counted.values()) == total
    assert {path: flops / PRODUCT for path, flops in counted.items()} == products


def test_products_of_a_gradient_of_a_gradient_are_the_layers():
    counted, total = count(Forces())
    assert sum(counted.values()) == total
    assert counted.keys() == {"first", "second"}
    assert all(flops > 4 * PRODUCT for flops in counted.values())


@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
def test_convolutions_inside_a_loop_over_time_are_counted(data_format):
    """A kernel of 3 x 3 from 2 features to 4 x 4, and one from 4: at 16 places, 5 times."""
    last = data_format == "channels_last"
    shape = (5, 4, 4, 2) if last else (5, 2, 4, 4)
    recurrent = layers.ConvLSTM2D(
        4, 3, padding="same", return_sequences=True, data_format=data_format, name="recurrent"
    )
    model = keras.Sequential([layers.Input(shape), recurrent])
    model.compile("sgd", "mse")
    x = tf.zeros((BATCH, *shape))
    y = tf.zeros((BATCH, *model.output_shape[1:]))
    counted = flops_by_unit(trace_step(model, layer_units(model), (x, y)))
    assert counted == {"recurrent": 3 * 2 * BATCH * 5 * 16 * 9 * 16 * (2 + 4)}


class Spectrum(keras.layers.Layer):
    """A product of complex numbers, on the way."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(16, 16), name="kernel")

    def call(self, x):
        complex_ = tf.cast(x, "complex64") @ tf.cast(self.kernel, "complex64")
        return tf.math.real(complex_)


def test_a_complex_product_is_four_real_ones():
    inputs = keras.Input((16,))
    counted, total = count(keras.Model(inputs, Spectrum(name="spectrum")(layers.Dense(16)(inputs))))
    assert sum(counted.values()) == total
    assert counted["spectrum"] == 4 * 3 * PRODUCT


class Neighbours(keras.layers.Layer):
    """Sums over the neighbours of a graph."""

    def call(self, x):
        edges = tf.sparse.SparseTensor([[0, 1], [2, 3], [5, 4]], [1.0, 1.0, 1.0], (BATCH, BATCH))
        return tf.sparse.sparse_dense_matmul(edges, x)


def test_of_a_sparse_matrix_what_it_holds_counts():
    inputs = keras.Input((16,))
    counted, _ = count(keras.Model(inputs, Neighbours(name="sum")(layers.Dense(16)(inputs))))
    assert counted["sum"] >= 2 * (2 * 3 * 16)
    assert counted["sum"] < PRODUCT


def test_layers_of_whole_numbers_cost_what_they_cost():
    """A frozen quantised body under a head that is trained."""
    body = sequential("body")
    body.layers[0].quantize("int8")
    body.trainable = False
    model = keras.Sequential([layers.Input((16,)), body, layers.Dense(16, name="head")])
    counted, total = count(model)
    assert sum(counted.values()) == total
    assert sum(flops for path, flops in counted.items() if path.startswith("body")) == PRODUCT
