"""A model that runs at one batch size only is described, tuned at its batch, and not split."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from autoprec.backends.keras.backend import KerasBackend
from autoprec.backends.keras.train.task_runner import build_model, state_variables
from autoprec.backends.protocol import Task
from autoprec.core.recipe import Recipe
from autoprec.core.speed.timing_budget import TimingBudget

BATCH = 8
layers = keras.layers


def build_data(batch_size):
    draws = np.random.default_rng(0)
    for _ in range(8):
        x = draws.normal(size=(batch_size, 6, 4)).astype("float32")
        yield x, x[:, :, :3].cumsum(axis=1) * np.float32(0.1)


def stateful():
    inputs = keras.Input(batch_shape=(BATCH, 6, 4))
    hidden = layers.GRU(8, stateful=True, return_sequences=True)(inputs)
    model = keras.Model(inputs, layers.Dense(3)(hidden))
    model.compile("sgd", "mse")
    return model


def contrastive():
    """Each sample is to find itself among the batch: labels of the batch's length."""

    def loss(y, z):
        flat = keras.ops.reshape(z, (-1, 18))
        logits = keras.ops.matmul(flat, keras.ops.transpose(flat))
        return keras.losses.sparse_categorical_crossentropy(
            tf.range(BATCH), logits, from_logits=True
        )

    model = keras.Sequential([layers.Input((6, 4)), layers.Dense(3)])
    model.compile("sgd", loss)
    return model


class Memory(layers.Layer):
    """Keeps a vector for every sample of the batch."""

    def build(self, shape):
        self.memory = self.add_weight(shape=shape, trainable=False, name="memory")

    def call(self, x):
        self.memory.assign(0.5 * self.memory + 0.5 * keras.ops.cast(x, "float32"))
        return x + keras.ops.cast(self.memory, x.dtype)


def remembering():
    inputs = keras.Input(batch_shape=(BATCH, 6, 4))
    model = keras.Model(inputs, layers.Dense(3)(Memory()(inputs)))
    model.compile("sgd", "mse")
    return model


class Reshaping(keras.Model):
    """A train_step that arranges the batch in groups of a constant size."""

    def __init__(self):
        super().__init__()
        self.head = layers.Dense(3)

    def call(self, x):
        return self.head(x)

    def train_step(self, given):
        x, y = given
        with tf.GradientTape() as tape:
            groups = keras.ops.reshape(self(x, training=True), (2, BATCH // 2, 6, 3))
            loss = keras.ops.mean(keras.ops.square(groups - keras.ops.reshape(y, groups.shape)))
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def reshaping():
    model = Reshaping()
    model.compile("sgd")
    model(np.zeros((BATCH, 6, 4), "float32"))
    return model


def eager():
    """A train_step that reads values, so that no function can trace it."""

    class Reading(Reshaping):
        def train_step(self, given):
            logs = super().train_step(given)
            return {"loss": keras.ops.convert_to_tensor(float(logs["loss"].numpy()))}

    model = Reading()
    model.compile("sgd", run_eagerly=True)
    model(np.zeros((BATCH, 6, 4), "float32"))
    return model


def task(model, named=BATCH):
    return Task(name="task.py", build_model=model, build_data=build_data, batch_size=named)


def describe(model, at=BATCH, named=BATCH):
    """Describe a task at a batch size; `named` is the one that its file names."""
    return KerasBackend().describe(
        task(model, named), device="cpu", seed=0, batch_size=at, report=lambda *_: None
    )


@pytest.mark.parametrize("model", [stateful, contrastive, remembering, reshaping])
def test_a_model_of_one_batch_size_is_not_split_and_says_why(model):
    facts = describe(model)
    assert not facts.splittable
    assert facts.split_reason.startswith("half a batch does not train")
    assert "batches of 8 only" in facts.split_reason
    assert "Error: " in facts.split_reason
    assert facts.fixed_batch
    assert facts.flops_per_sample
    assert facts.step_seconds > 0


def test_what_cannot_be_counted_is_unknown_and_said():
    facts = describe(eager)
    assert facts.flops_per_sample is None
    assert facts.kernels == ()
    assert any("could not be counted" in warning for warning in facts.warnings)
    assert facts.step_seconds > 0


def test_a_model_that_runs_at_any_batch_is_split_as_before():
    def model():
        model = keras.Sequential([layers.Input((6, 4)), layers.Dense(3)])
        model.compile("sgd", "mse")
        return model

    facts = describe(model)
    assert facts.splittable
    assert facts.split_reason == ""
    assert not facts.fixed_batch


class Centred(layers.Layer):
    """Takes the mean from every eight samples."""

    def call(self, x):
        groups = keras.ops.reshape(x, (-1, BATCH, 6, 4))
        return keras.ops.reshape(groups - keras.ops.mean(groups, 1, keepdims=True), (-1, 6, 4))


def of_groups():
    """Runs at every multiple of its batch."""
    inputs = layers.Input((6, 4))
    model = keras.Model(inputs, layers.Dense(3)(Centred()(inputs)))
    model.compile("sgd", "mse")
    return model


def test_a_model_that_trains_larger_batches_is_not_held_to_one():
    facts = describe(of_groups, named=None)
    assert not facts.splittable
    assert facts.split_reason.startswith("half a batch does not train (")
    assert not facts.fixed_batch


def nested(batch=BATCH):
    """A subclass around a functional model of one batch."""
    inputs = keras.Input(batch_shape=(batch, 6, 4))
    hidden = layers.SimpleRNN(8, stateful=True, return_sequences=True)(inputs)
    model = Around(keras.Model(inputs, hidden))
    model.compile("sgd", "mse")
    return model


class Around(keras.Model):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.head = inner, layers.Dense(3)

    def call(self, x):
        return self.head(self.inner(x))


class Unbuilt(keras.Model):
    """Makes its weights and the states that it carries when it is first called."""

    def __init__(self, bidirectional=False):
        super().__init__()
        cell = layers.GRU(4, stateful=True, return_sequences=True)
        self.recurrent = layers.Bidirectional(cell) if bidirectional else cell
        self.head = layers.Dense(3)

    def call(self, x):
        return self.head(self.recurrent(x))


@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_subclassed_model_that_carries_states_and_is_not_built_is_described(bidirectional):
    def build():
        model = Unbuilt(bidirectional)
        model.compile("sgd", "mse")
        return model

    directions = 1 + bidirectional
    facts = describe(build, named=None)
    assert facts.fixed_batch
    assert not facts.splittable
    assert facts.parameters == directions * (3 * 4 * (4 + 4 + 2)) + directions * 4 * 3 + 3
    model = build_model(task(build), 0, next(build_data(BATCH)))
    carried = [v for v in state_variables(model) if v.name == "rnn_state"]
    assert [np.abs(v.numpy()).max() for v in carried] == directions * [0.0]


@pytest.mark.parametrize(
    ("model", "batch"),
    [(stateful, 8), (nested, 8), (lambda: nested(7), 7), (lambda: nested(1), 1)],
    ids=["stateful", "inside another", "an odd batch", "one sample"],
)
def test_without_a_batch_size_a_model_is_described_at_the_one_it_is_built_for(model, batch):
    facts = describe(model, at=32, named=None)
    assert (facts.nominal, facts.samples) == (batch, batch)
    assert facts.fixed_batch
    assert not facts.splittable
    assert f"built for batches of {batch} and does not train at 32" in facts.split_reason


def test_the_tasks_own_errors_are_raised():
    def broken():
        model = stateful()
        model.compile("sgd", lambda y, z: 1 / 0)
        return model

    for at in (BATCH, 32):
        with pytest.raises(ZeroDivisionError):
            describe(broken, at, named=None)
    with pytest.raises(ValueError, match="batch size of the input sequences must be the same"):
        describe(stateful, at=16, named=16)


@pytest.mark.parametrize("model", [stateful, contrastive])
def test_it_is_timed_and_compared_at_its_batch(model):
    given = task(model)
    backend = KerasBackend()
    recipe = Recipe("mixed_bfloat16", batch_size=BATCH)
    session = backend.open(given, recipe, device="cpu", seed=0, report=lambda *_: None)
    budget = TimingBudget(seconds=0.1, min_steps=2, max_steps=3)
    assert session.time_steps(budget).samples_per_step == BATCH
    session.close()


def test_what_a_recurrent_layer_carries_is_state():
    model = build_model(task(stateful), 0, next(build_data(BATCH)))
    assert [v.name for v in state_variables(model)][-1] == "rnn_state"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("mixing", [False, True])
def test_a_model_of_a_16_bit_dtype_is_split_unless_it_mixes_samples(dtype, mixing):
    def build():
        more = [layers.BatchNormalization(dtype=dtype)] if mixing else []
        model = keras.Sequential(
            [
                keras.Input((6, 4)),
                layers.Dense(32, "gelu", dtype=dtype),
                *more,
                layers.Dense(3, dtype=dtype),
            ]
        )
        model.compile("adam", "mse")
        return model

    task = Task("task.py", build, build_data)
    found = KerasBackend().describe(
        task, device="cpu", seed=0, batch_size=BATCH, report=lambda phase, step: None
    )
    assert found.splittable is not mixing
    assert mixing is ("BatchNorm" in found.split_reason)


def test_batches_of_sparse_inputs_are_halved():
    """A SparseTensor cannot be sliced as arrays are."""

    def sparse_model():
        inputs = keras.Input((20,), sparse=True)
        model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
        model.compile("sgd", "mse")
        return model

    def sparse_data(batch_size):
        draws = np.random.default_rng(0)
        for _ in range(20):
            x = draws.normal(size=(batch_size, 20)) * (draws.random((batch_size, 20)) > 0.8)
            yield tf.sparse.from_dense(x.astype("float32")), x[:, :1].astype("float32")

    task = Task("task.py", sparse_model, sparse_data)
    facts = KerasBackend().describe(
        task, device="cpu", seed=0, batch_size=8, report=lambda *_: None
    )
    assert facts.splittable, facts.split_reason
