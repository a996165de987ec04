"""What every trial of a captured model trains is the model: a copy that leaves nothing out."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from autoprec.backends.keras.capture import from_keras
from autoprec.backends.keras.surgeon import KerasSurgeon
from autoprec.backends.keras.train.data import to_numpy, to_tensors
from autoprec.backends.keras.train.task_runner import loss_and_gradients, to_float
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Recipe
from autoprec.errors import TaskError
from autoprec.workers import sent_objects

layers = keras.layers
CROSS_ENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
WORDS = np.array(["one", "two", "three two", "four"] * 8)


def vectors() -> Any:
    return np.random.default_rng(1).normal(size=(32, 6)).astype("float32")


def labels() -> Any:
    return np.arange(32) % 3


def net(*inside: Any, optimizer: Any = "sgd", loss: Any = CROSS_ENTROPY, **settings: Any) -> Any:
    model = keras.Sequential([keras.Input((6,)), *inside, layers.Dense(3)])
    model.compile(optimizer, loss, **settings)
    return model


def step(model: Any, x: Any) -> tuple[float, Any]:
    loss, gradients = loss_and_gradients(model, to_tensors((x, labels())))
    return to_float(loss), np.concatenate([np.ravel(to_numpy(each)) for each in gradients])


def assert_alike(model: Any, copy: Any, x: Any) -> None:
    (loss, gradient), (theirs, other) = step(model, x), step(copy, x)
    assert theirs == pytest.approx(loss, rel=1e-6)
    assert np.linalg.norm(gradient) > 0
    np.testing.assert_allclose(other, gradient, rtol=1e-4, atol=1e-6)


def normalized() -> Any:
    layer = layers.Normalization()
    layer.adapt(300.0 + 50.0 * vectors())
    return net(layer, layers.Dense(8, "tanh")), 300.0 + 50.0 * vectors()


def looked_up(layer: Any, *after: Any) -> Any:
    layer.adapt(WORDS)
    inputs = keras.Input((), dtype="string")
    outputs = layer(inputs)
    for each in after:
        outputs = each(outputs)
    model = keras.Model(inputs, layers.Dense(3)(outputs))
    model.compile("sgd", CROSS_ENTROPY)
    return model, WORDS


def text_ids() -> Any:
    ids = layers.TextVectorization(output_sequence_length=2)
    return looked_up(ids, layers.Embedding(8, 4), layers.Flatten())


def text_weights() -> Any:
    return looked_up(layers.TextVectorization(output_mode="tf_idf"))


def word_ids() -> Any:
    return looked_up(layers.StringLookup(), layers.Embedding(8, 4))


def gelu(x: Any) -> Any:
    """Has the name of one of Keras's functions."""
    return x * ops.sigmoid(3.0 * x)


def wave(x: Any) -> Any:
    return ops.sin(x)


def heavy(weight: Any) -> Any:
    return 0.5 * ops.sum(ops.square(weight))


def named_alike() -> Any:
    return net(layers.Dense(8, gelu)), vectors()


def of_its_own() -> Any:
    return net(layers.Dense(8, wave, kernel_regularizer=heavy)), vectors()


def distance(targets: Any, outputs: Any) -> Any:
    wanted = ops.one_hot(ops.cast(targets, "int32"), 3)
    return ops.mean(ops.square(outputs - wanted), -1)


class Distance(keras.losses.Loss):
    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = factor

    def call(self, targets: Any, outputs: Any) -> Any:
        return self.factor * distance(targets, outputs)

    def get_config(self) -> Any:
        return {"factor": self.factor}


class Counted(keras.metrics.Mean):
    def __init__(self, classes: int) -> None:
        super().__init__(name="counted")
        self.classes = classes

    def update_state(self, targets: Any, outputs: Any, sample_weight: Any = None) -> None:
        super().update_state(self.classes * ops.ones_like(targets))


class Falling(keras.optimizers.schedules.LearningRateSchedule):
    def __init__(self, base: float) -> None:
        self.base = base

    def __call__(self, step: Any) -> Any:
        return self.base / (1.0 + ops.cast(step, "float32"))


def own_loss() -> Any:
    return net(loss=distance), vectors()


def own_classes() -> Any:
    optimizer = keras.optimizers.SGD(Falling(0.1))
    return net(loss=Distance(3.0), optimizer=optimizer, metrics=[Counted(3)]), vectors()


class Times(layers.Layer):
    def __init__(self, **named: Any) -> None:
        super().__init__(**named)
        self.factor = 1.0

    def call(self, x: Any) -> Any:
        return self.factor * x


class Softened(keras.Model):
    """Makes its graph itself, and takes a step of its own."""

    def __init__(self, width: int) -> None:
        inputs, head = keras.Input((6,)), layers.Dense(3)
        super().__init__(inputs=inputs, outputs=head(layers.Dense(width)(inputs)))
        self.heads, self.share = [head], 0.5

    def train_step(self, given: Any) -> Any:
        x, y = given
        with tf.GradientTape() as tape:
            loss = self.share * self.compute_loss(x, y, self(x, training=True))
            loss += 0.1 * ops.sum(ops.square(self.heads[0].kernel))
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def own_graph() -> Any:
    model = Softened(5)
    model.share = 0.25
    model.compile("sgd", CROSS_ENTROPY)
    return model, vectors()


def adapted() -> Any:
    """Trains small matrices beside a frozen one."""
    model = net(layers.Dense(8, "tanh"))
    model.layers[0].enable_lora(2)
    model.compile("sgd", CROSS_ENTROPY)
    return model, vectors()


KINDS: list[Callable[[], Any]] = [
    *(normalized, text_ids, text_weights, word_ids, named_alike, of_its_own),
    *(own_loss, own_classes, own_graph, adapted),
]


@pytest.mark.parametrize("make", KINDS)
def test_a_clone_is_the_model(make: Callable[[], Any]) -> None:
    model, x = make()
    clone = from_keras(model, x, labels(), name="train.py").build_model()
    assert type(clone) is type(model)
    assert_alike(model, clone, x)


@pytest.mark.parametrize("make", [normalized, text_ids, named_alike, of_its_own, own_loss, adapted])
def test_a_model_that_is_sent_arrives_as_it_is(make: Callable[[], Any], tmp_path: Path) -> None:
    model, x = make()
    with sent_objects.sent((model, x, labels()), tmp_path) as path:
        received, *_ = sent_objects.receive(path)
    assert_alike(model, received, x)


NOTEBOOK = """
import pickle, sys
from pathlib import Path
import keras
from autoprec.workers.sent_objects import sent

class Twice(keras.layers.Layer):
    def call(self, x):
        return 2.0 * x

model = keras.Sequential([keras.Input((6,)), Twice(), keras.layers.Dense(3, use_bias=False)])
model.compile("sgd", "mse")
with sent((model, None), None) as path:
    Path(sys.argv[1]).write_bytes(path.read_bytes())
"""


def test_a_layer_that_a_notebook_defines_is_sent_along(tmp_path: Path) -> None:
    place, script = tmp_path / "sent.pickle", tmp_path / "notebook.py"
    script.write_text(NOTEBOOK, encoding="utf-8")
    subprocess.run([sys.executable, script, place], check=True, env={**os.environ}, timeout=240)
    received, _ = sent_objects.receive(place)
    x = vectors()
    np.testing.assert_allclose(received(x), 2.0 * x @ received.layers[-1].kernel, rtol=1e-5)


def test_which_layers_its_author_made_float32_is_known_of_a_clone_and_of_what_was_sent() -> None:
    head = layers.Dense(3, dtype="float32")
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8), layers.Dense(8), head])
    model.compile("sgd", CROSS_ENTROPY)
    clone = from_keras(model, vectors(), labels(), name="train.py").build_model()
    received = pickle.loads(sent_objects._bytes_of(model))
    for each in (model, clone, received):
        precision = KerasSurgeon().apply(Recipe(policy=Policy.MIXED_BFLOAT16), model=each)
        assert precision.report.kept == ("dense_2",)
        precision.restore()


@pytest.mark.parametrize("scaled", [False, True])
def test_accumulation_inside_a_loss_scale_is_the_tasks(scaled: bool) -> None:
    optimizer = keras.optimizers.Adam(3e-4, gradient_accumulation_steps=2)
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=64.0)
        model = net(optimizer=optimizer)
    else:  # Keras adds the loss scale
        keras.config.set_dtype_policy("mixed_float16")
        model = net(optimizer=optimizer)
        keras.config.set_dtype_policy("float32")
    task = from_keras(model, vectors(), labels(), batch_size=8, name="train.py")
    made = task.build_model().optimizer
    assert task.batch_size == 16
    assert made.inner_optimizer.gradient_accumulation_steps is None
    assert float(made.inner_optimizer.learning_rate) == pytest.approx(3e-4)
    assert made.initial_scale == (64.0 if scaled else 2.0**15)


def test_a_copy_that_takes_another_step_is_refused() -> None:
    times = Times()
    model = net(layers.Dense(8), times)
    task = from_keras(model, vectors(), labels(), name="train.py")
    times.factor = 3.0
    with pytest.raises(TaskError, match=r"is not what was given: .* an attribute that was set"):
        task.build_model()
    times.factor = 1.0
    assert task.build_model() is not None


def test_random_numbers_of_a_step_are_no_difference() -> None:
    model = net(layers.Dense(64), layers.Dropout(0.5), layers.GaussianNoise(0.5))
    assert from_keras(model, vectors(), labels(), name="train.py").build_model() is not None
