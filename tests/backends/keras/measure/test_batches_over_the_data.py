"""Keras: batches that differ from the first ones are looked at, compared and measured."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autoprec.backends.keras.backend import KerasBackend
from autoprec.backends.protocol import Task
from autoprec.backends.shared.process_memory import return_freed_memory
from autoprec.core.measurement import Measurement, TaskFacts
from autoprec.core.recipe import Recipe
from autoprec.core.speed.timing_budget import TimingBudget

pytestmark = pytest.mark.usefixtures("unhurried")

QUICK = TimingBudget(seconds=0.2, min_steps=3, max_steps=8)
WORDS = 20


def describe(build_model: Callable[[], Any], build_data: Callable[[int], Any]) -> TaskFacts:
    task = Task("task.py", build_model, build_data)
    return KerasBackend().describe(task, device="cpu", seed=0, batch_size=8, report=lambda *_: None)


def refused(build_model: Callable[[], Any], build_data: Callable[[int], Any]) -> str:
    found = describe(build_model, build_data)
    assert not found.splittable
    assert "in batch " in found.split_reason
    return found.split_reason


def tagger(mask_zero: bool = True) -> Any:
    """A net whose loss is the mean over the words that are not padding."""
    model = keras.Sequential(
        [
            keras.layers.Embedding(WORDS, 8, mask_zero=mask_zero),
            keras.layers.Dense(WORDS),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="sgd", loss=loss)
    return model


def texts(batch_size: int, ragged_from: int = 4) -> Iterator[Any]:
    for step in range(30):
        words = np.random.randint(1, WORDS, (batch_size, 10))
        targets = np.roll(words, 1, 1)
        if step >= ragged_from:
            words[np.arange(10) >= np.random.randint(1, 11, (batch_size, 1))] = 0
        yield words, targets


def test_padding_that_a_mask_leaves_out_from_the_fifth_batch_on_is_found() -> None:
    assert "those of the first batch agree" in refused(tagger, texts)


def test_the_same_texts_may_be_split_without_a_mask_or_without_padding() -> None:
    assert describe(lambda: tagger(mask_zero=False), texts).splittable
    assert describe(tagger, lambda n: texts(n, ragged_from=99)).splittable


def weighted_net(reduction: str) -> Any:
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3)])
    model.compile(
        optimizer="sgd",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction),
    )
    return model


def weighted_rows(batch_size: int) -> tf.data.Dataset:
    x = np.random.randn(160, 4).astype("float32")
    y = np.random.randint(0, 3, 160)
    weights = np.where(np.arange(160) < 40, 1.0, 1.0 + 9.0 * (y == 0)).astype("float32")
    return tf.data.Dataset.from_tensor_slices((x, y, weights)).batch(batch_size)


def test_a_mean_over_sample_weights_is_found_where_the_first_are_all_one() -> None:
    refused(lambda: weighted_net("mean_with_sample_weight"), weighted_rows)


def test_weights_of_one_batch_are_found_among_inputs_of_noise() -> None:
    def data(batch_size: int) -> Iterator[Any]:
        for step in range(150):
            weights = np.ones(batch_size, "float32")
            weights[: batch_size // 2] += 2.0 * (step == 121)
            x = np.random.randn(batch_size, 4).astype("float32")
            yield x, np.random.randint(0, 3, batch_size), weights

    assert "in batch 121" in refused(lambda: weighted_net("mean_with_sample_weight"), data)


def test_sample_weights_that_are_summed_over_the_batch_size_may_be_split() -> None:
    assert describe(lambda: weighted_net("sum_over_batch_size"), weighted_rows).splittable


class Objects(keras.Model):
    """Divides by the number of objects, as detectors do, in a train_step of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = keras.layers.Dense(4)

    def call(self, x: Any) -> Any:
        return self.head(x)

    def train_step(self, data: Any) -> Any:
        x, (boxes, present) = data
        with tf.GradientTape() as tape:
            errors = tf.abs(self(x, training=True)[:, None] - boxes) * present[..., None]
            loss = tf.reduce_sum(errors) / tf.reduce_sum(present)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class Scenes(keras.utils.PyDataset):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        random = np.random.default_rng(index)
        count = self.batch_size
        present = np.ones((count, 5), "float32")
        if index > 3:
            present[:, 1:] = random.random((count, 4)) < 0.4
        boxes = random.normal(size=(count, 5, 4)).astype("float32")
        return random.normal(size=(count, 6)).astype("float32"), (boxes, present)


def test_objects_counted_in_a_train_step_of_the_models_own_are_found() -> None:
    def model() -> Any:
        net = Objects()
        net.compile(optimizer="sgd")
        return net

    refused(model, Scenes)


def reader() -> Any:
    model = keras.Sequential(
        [
            keras.layers.Input((None, 1)),
            keras.layers.Dense(16, "tanh"),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(optimizer="sgd", loss="mse")
    return model


def series(short: int, long: int, long_from: int = 50) -> Callable[[int], Iterator[Any]]:
    def data(batch_size: int) -> Iterator[Any]:
        for step in range(80):
            length = short if step < long_from else long
            x = np.ones((batch_size, length, 1), "float32")
            yield x, np.zeros((batch_size, 1), "float32")

    return data


def measure(build_data: Any, recipe: Recipe) -> tuple[Measurement, int]:
    task = Task("task.py", reader, build_data)
    gc.collect()
    return_freed_memory()  # what earlier tests left is no part of the peak, nor room for it
    session = KerasBackend().open(task, recipe, device="cpu", seed=0, report=lambda *_: None)
    measured = session.time_steps(QUICK)
    updates = int(session._precision.steps)
    session.close()
    return measured, updates


def test_short_batches_first_are_said_and_memory_is_the_longests() -> None:
    facts = describe(reader, series(4, 100))
    assert facts.most_saved_bytes_per_sample > 2 * facts.saved_bytes_per_sample
    (warning,) = facts.warnings
    assert "batches differ in shape: 4 to 100 in dimension 1 of the inputs" in warning
    recipe = Recipe(batch_size=16)
    short, _ = measure(series(4, 4), recipe)
    long, updates = measure(series(4, 200_000, long_from=79), recipe)
    assert updates == long.steps + long.warmup_steps
    activation = 16 * 200_000 * 16 * 4  # one of several; freed memory serves some of them again
    assert long.peak_memory_bytes - short.peak_memory_bytes > activation / 2
    assert long.samples_per_step == 16


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(batch_size=4, accumulation_steps=2),
        Recipe(batch_size=4, knobs={"steps_per_execution": 3}),
        Recipe(batch_size=4, accumulation_steps=2, knobs={"steps_per_execution": 4}),
        Recipe(batch_size=4, compile=True),
    ],
    ids=["accumulation", "executions", "both", "jit"],
)
def test_batches_of_several_lengths_are_timed_under_every_knob(recipe: Recipe) -> None:
    measured, updates = measure(series(4, 9, long_from=30), recipe)
    assert measured.samples_per_step == 4 * recipe.accumulation_steps
    assert updates == measured.steps + measured.warmup_steps
    assert measured.finite


def test_data_sets_that_pad_each_batch_are_looked_at() -> None:
    def data(batch_size: int) -> tf.data.Dataset:
        lengths = tf.data.Dataset.range(2, 66)
        rows = lengths.map(lambda n: (tf.ones((n, 1)), tf.zeros((1,))))
        return rows.padded_batch(batch_size, ([None, 1], [1]))

    (warning,) = describe(reader, data).warnings
    assert "9 to 65 in dimension 1 of the inputs, in all 8 batches" in warning
    measured, _ = measure(data, Recipe(batch_size=8))
    assert measured.samples_per_step == 8


def test_a_later_batch_that_breaks_the_model_is_a_reason_and_no_error() -> None:
    def data(batch_size: int) -> Iterator[Any]:
        for step in range(12):
            x = np.ones((batch_size, 4 if step < 11 else 5), "float32")
            yield x, np.zeros(batch_size, "int32")

    reason = refused(lambda: weighted_net("sum_over_batch_size"), data)
    assert "two halves could not be compared with their batch: " in reason
    assert reason.endswith(", in batch 11")


class Balance(keras.layers.Layer):
    """Adds a loss for an uneven use of its experts, as mixtures do: shares of the whole batch."""

    def build(self, shape: Any) -> None:
        self.gate = keras.layers.Dense(4)
        self.gate.build(shape)

    def call(self, x: Any) -> Any:
        chances = keras.ops.softmax(self.gate(x))
        chosen = keras.ops.one_hot(keras.ops.argmax(chances, -1), 4)
        shares = keras.ops.mean(chances, (0, 1)) * keras.ops.mean(chosen, (0, 1))
        self.add_loss(4.0 * keras.ops.sum(shares))
        return x


def balanced() -> Any:
    inputs = keras.Input((6, 4))
    model = keras.Model(inputs, keras.layers.Dense(1)(Balance()(inputs)))
    model.compile("sgd", "mse")
    return model


def masked() -> Any:
    """A recurrent net over time steps of which those of zeros alone are left out."""
    inputs = keras.Input((6, 4))
    hidden = keras.layers.GRU(8, return_sequences=True)(keras.layers.Masking()(inputs))
    model = keras.Model(inputs, keras.layers.TimeDistributed(keras.layers.Dense(1))(hidden))
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("build", [balanced, masked])
def test_shares_of_the_batch_and_masked_time_steps_are_found(build: Callable[[], Any]) -> None:
    """The first batches hold a sample again and again, of all time steps."""

    def data(batch_size: int) -> Iterator[Any]:
        for step in range(30):
            x = np.random.randn(batch_size, 6, 4).astype("float32")
            x[:] = x if step >= 5 else x[:1]
            x[np.arange(6) >= np.random.randint(1, 7, (batch_size, 1))] *= step < 5
            yield x, x[..., :1]

    refused(build, data)


class Heads(keras.Model):
    """Gives a dict of dicts; the loss of one head is a mean over the rare samples of its class."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(8, "relu")
        self.first, self.second = keras.layers.Dense(1), keras.layers.Dense(1, "sigmoid")

    def call(self, x: Any) -> Any:
        hidden = self.hidden(x)
        return {"first": self.first(hidden), "second": {"rare": self.second(hidden)}}


def test_a_rare_class_of_one_head_of_several_is_found() -> None:
    def mean_of_rare(y: Any, found: Any) -> Any:
        return keras.ops.sum(y * keras.ops.square(1.0 - found)) / (keras.ops.sum(y) + 1e-6)

    def model() -> Any:
        net = Heads()
        net.compile("sgd", {"first": "mse", "second": {"rare": mean_of_rare}})
        return net

    def data(batch_size: int) -> Iterator[Any]:
        for step in range(60):
            x = np.random.randn(batch_size, 6).astype("float32")
            rare = (np.arange(batch_size)[:, None] == 0) * np.float32(step == 41)
            yield x, {"first": x[:, :1], "second": {"rare": rare}}

    assert "in batch 41" in refused(model, data)
