"""Batches of rows of different lengths, which a `tf.RaggedTensor` holds, are batches as any."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from autoprec import apply_profile
from autoprec.backends.keras.backend import KerasBackend
from autoprec.backends.keras.capture import from_keras
from autoprec.backends.keras.train.data import shape_of, size_in_bytes
from autoprec.backends.protocol import Task
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Recipe
from autoprec.core.speed.timing_budget import TimingBudget
from autoprec.tuning.proof.recipe_proof import Proof

WORDS = 20
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def texts(batch_size: int) -> Iterator[Any]:
    """Later texts are longer."""
    random = np.random.default_rng(0)
    for step in range(12):
        lengths = random.integers(1, 4 + 2 * step, batch_size)
        words = random.integers(1, WORDS, lengths.sum()).astype("int32")
        yield tf.RaggedTensor.from_row_lengths(words, lengths), random.integers(0, 3, batch_size)


class Mean(keras.layers.Layer):
    """The mean of each text's words."""

    def call(self, words: Any) -> Any:
        return tf.reduce_mean(words, axis=1)


def averaged() -> Any:
    """A functional model whose layers are given ragged rows."""
    words = keras.Input((None,), dtype="int32", ragged=True)
    table = keras.layers.Embedding(WORDS, 8)(words)
    model = keras.Model(words, keras.layers.Dense(3)(Mean()(table)))
    model.compile("sgd", LOSS)
    return model


class Reader(keras.Model):
    """Fills the rows up by itself, to a length that its graph does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.table = keras.layers.Embedding(WORDS, 8, mask_zero=True)
        self.recurrent, self.head = keras.layers.GRU(8), keras.layers.Dense(3)

    def call(self, words: Any) -> Any:
        return self.head(self.recurrent(self.table(words.to_tensor())))


def reader() -> Any:
    model = Reader()
    model.compile("sgd", LOSS, metrics=["accuracy"])
    return model


def test_a_ragged_array_takes_the_bytes_of_its_rows_and_has_the_shape_of_its_longest() -> None:
    ragged = tf.ragged.constant([[1.0, 2.0, 3.0], [4.0]])
    assert shape_of(ragged) == (2, 3)
    assert size_in_bytes((ragged, np.zeros((2, 1), "float32"))) == 4 * 4 + 3 * 8 + 2 * 4


@pytest.mark.parametrize("build", [averaged, pytest.param(reader, marks=pytest.mark.slow)])
def test_they_are_described_and_timed(build: Callable[[], Any]) -> None:
    task, backend = Task("task.py", build, texts), KerasBackend()
    facts = backend.describe(task, device="cpu", seed=0, batch_size=8, report=lambda *_: None)
    assert facts.splittable, facts.split_reason
    assert "in dimension 1 of the inputs, in all 12 batches" in facts.warnings[-1]
    recipe = Recipe(Policy.MIXED_BFLOAT16, 4, accumulation_steps=2)
    session = backend.open(task, recipe, device="cpu", seed=0, report=lambda *_: None)
    measured = session.time_steps(TimingBudget(seconds=0.1, min_steps=2, max_steps=3))
    session.close()
    assert measured.samples_per_step == 8
    assert measured.finite


@pytest.mark.parametrize("build", [averaged, pytest.param(reader, marks=pytest.mark.slow)])
def test_float16_is_compared_with_float32(build: Callable[[], Any]) -> None:
    task = Task("task.py", build, texts)
    tracer = KerasBackend().tracer(task, device="cpu", seed=0, report=lambda *_: None)
    verdict = Proof(tracer, steps=8).prove(Recipe(Policy.MIXED_FLOAT16, 8))
    assert verdict.accepted, verdict.reason


def test_what_fit_is_given_is_a_task_and_trained_under_a_profile() -> None:
    words = tf.concat([batch for batch, _ in texts(8)], 0)
    targets = np.arange(96) % 3
    task = from_keras(averaged(), words, targets, batch_size=8, name="train.py")
    facts = KerasBackend().describe(
        task, device="cpu", seed=0, batch_size=8, report=lambda *_: None
    )
    assert facts.samples == 8
    model = averaged()
    with apply_profile(Recipe(Policy.MIXED_BFLOAT16, 8), model=model) as precision:
        model.fit(words, targets, batch_size=8, verbose=0)
        assert precision.steps == 12
