"""The proof of a Keras task: state that only evaluation reads, and splitting, by its verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from autoprec.backends.keras.backend import KerasBackend
from autoprec.backends.protocol import Task
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Recipe
from autoprec.tuning.proof.recipe_proof import Proof


class Squares(keras.layers.Layer):
    """Sums up squares of features that lie far from zero, for evaluation; passes them on."""

    def __init__(self, careful: bool) -> None:
        super().__init__()
        self.careful = careful

    def build(self, shape: Any) -> None:
        kept = {"initializer": "zeros", "trainable": False, "autocast": not self.careful}
        self.total = self.add_weight(shape=shape[-1:], name="total", **kept)

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            values = ops.cast(inputs, "float32") if self.careful else inputs
            added = self.total + ops.sum(ops.square(values), axis=0)
            self.total.assign(ops.cast(added, self.total.value.dtype))
        return inputs


def network(*layers: Callable[[], Any]) -> Any:
    made = [keras.Input((8,)), keras.layers.Dense(16, activation="tanh"), *(f() for f in layers)]
    model = keras.Sequential([*made, keras.layers.Dense(4, dtype="float32")])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(1e-2), loss, run_eagerly=True)  # its steps are few
    return model


def batches(batch_size: int) -> Iterator[Any]:
    random = np.random.default_rng(0)
    centres = random.normal(size=(4, 8))
    for _ in range(40):
        y = random.integers(0, 4, batch_size)
        yield (centres[y] + 0.7 * random.normal(size=(batch_size, 8))).astype("float32"), y


def proof(build_model: Callable[[], Any], **more: Any) -> Proof:
    task = Task(**{"name": "task.py", "build_model": build_model, "build_data": batches, **more})
    tracer = KerasBackend().tracer(task, device="cpu", seed=0, report=lambda *_: None)
    return Proof(tracer, steps=8)


def verdict(recipe: Recipe, *layers: Callable[[], Any]) -> Any:
    return proof(lambda: network(*layers)).prove(recipe)


def test_sums_that_steps_round_are_drift_and_named() -> None:
    found = verdict(Recipe(Policy.MIXED_BFLOAT16, 16), lambda: Squares(careful=False))
    assert found.verdict == "drift"
    assert "squares/total" in found.reason
    assert verdict(Recipe(Policy.MIXED_BFLOAT16, 16), lambda: Squares(careful=True)).accepted


class Codebook(keras.layers.Layer):
    """Follows the means of what is nearest to each of its vectors; evaluation reads the vectors."""

    def __init__(self, careful: bool) -> None:
        super().__init__()
        self.careful = careful

    def build(self, shape: Any) -> None:
        kept = {"trainable": False, "autocast": not self.careful, "initializer": "glorot_uniform"}
        self.counts = self.add_weight(shape=(6,), **{**kept, "initializer": "ones"})
        self.table, self.sums = (
            self.add_weight(shape=(6, shape[-1]), name=name, **kept) for name in ("table", "sums")
        )

    def call(self, inputs: Any, training: bool = False) -> Any:
        x = ops.cast(inputs, "float32") if self.careful else inputs
        distances = ops.sum(ops.square(x[:, None] - self.table[None]), -1)
        nearest = ops.one_hot(ops.argmin(distances, -1), 6, dtype=x.dtype)
        if training:
            sums = ops.matmul(ops.transpose(nearest), x)
            for kept, new in ((self.counts, ops.sum(nearest, 0)), (self.sums, sums)):
                kept.assign(0.999 * kept + 0.001 * new)
            self.table.assign(self.sums / self.counts[:, None])
            return inputs
        return ops.cast(ops.matmul(nearest, self.table + 0.0), inputs.dtype)


class Teacher(keras.Model):
    """Is evaluated by the average of its weights that each step moves."""

    def __init__(self, careful: bool) -> None:
        super().__init__()
        self.careful = careful
        self.student, self.teacher = (keras.layers.Dense(4, trainable=t) for t in (True, False))

    def build(self, shape: Any) -> None:
        self.student.build(shape)
        self.teacher.build(shape)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.student(x) if training else self.teacher(x)

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        for own, kept in zip(self.student.weights, self.teacher.weights, strict=True):
            new = 0.999 * kept + 0.001 * own
            kept.assign(new if self.careful else ops.cast(ops.cast(new, self.dtype), "float32"))
        return logs

    @property
    def dtype(self) -> str:
        """What the model computes in, as careless code takes it."""
        return str(self.compute_dtype)


@pytest.mark.parametrize("careful", [True, False])
def test_a_codebook_that_steps_round_is_drift(careful: bool) -> None:
    found = verdict(Recipe(Policy.MIXED_BFLOAT16, 16), lambda: Codebook(careful))
    assert found.accepted is careful, found.reason
    assert careful or "codebook/" in found.reason


@pytest.mark.parametrize("careful", [True, False])
def test_an_average_that_train_step_rounds_is_drift(careful: bool) -> None:
    def build() -> Any:
        model = Teacher(careful)
        model.build((None, 8))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(1e-2), loss, run_eagerly=True)
        return model

    found = proof(build).prove(Recipe(Policy.MIXED_BFLOAT16, 16))
    assert found.accepted is careful, found.reason
    assert careful or "the buffers dense_1/kernel" in found.reason


def test_a_split_batch_whose_samples_mix_is_compared_with_the_whole_one() -> None:
    """Float32 that is split is no reference, though it computes in float32."""
    split = Recipe(batch_size=8, accumulation_steps=2)
    found = verdict(split, keras.layers.BatchNormalization)
    assert found.verdict == "rejected"
    assert "2 micro-batches of 8" in found.reason
    assert verdict(split).accepted


class Centred(keras.layers.Layer):
    """Centres its features around an offset, in evaluation alone."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.offset = offset

    def call(self, inputs: Any, training: bool = False) -> Any:
        return inputs if training else (inputs + self.offset) - self.offset


def test_a_branch_that_only_evaluation_takes_is_compared() -> None:
    whole, broken = (
        verdict(Recipe(Policy.MIXED_BFLOAT16, 16), lambda offset=offset: Centred(offset))
        for offset in (0.0, 2000.0)
    )
    assert whole.accepted, whole.reason
    assert "the model's outputs in evaluation" in whole.covered
    assert broken.verdict == "drift"
    assert "in evaluation, at the weights of step 7" in broken.reason


def attending(words: Any) -> Any:
    return keras.layers.MultiHeadAttention(2, 8)(words, words, use_causal_mask=True)


def reading(words: Any) -> Any:
    return keras.layers.Bidirectional(keras.layers.GRU(8, return_sequences=True))(words)


@pytest.mark.slow
@pytest.mark.parametrize("between", [attending, reading])
def test_masked_texts_are_evaluated_in_bfloat16(between: Any) -> None:
    """Attention and recurrence, with padding, in predict and evaluate as in training."""

    def build() -> Any:
        inputs = keras.Input((6,), dtype="int32")
        hidden = between(keras.layers.Embedding(20, 16, mask_zero=True)(inputs))
        pooled = keras.layers.GlobalAveragePooling1D()(keras.layers.LayerNormalization()(hidden))
        model = keras.Model(inputs, keras.layers.Dense(3)(pooled))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(1e-2), loss)
        return model

    def texts(batch_size: int) -> Iterator[Any]:
        random = np.random.default_rng(0)
        for _ in range(10):
            words = random.integers(1, 20, (batch_size, 6)).astype("int32")
            words[np.arange(6) >= random.integers(1, 7, (batch_size, 1))] = 0
            yield words, random.integers(0, 3, batch_size)

    def evaluate(model: Any) -> float:
        words, classes = next(texts(16))
        assert np.isfinite(model.predict(words, verbose=0)).all()
        return -float(model.evaluate(words, classes, verbose=0))

    found = proof(build, build_data=texts, evaluate=evaluate).prove(
        Recipe(Policy.MIXED_BFLOAT16, 16)
    )
    assert found.accepted, found.reason


class Fourier(keras.layers.Layer):
    """Weighs frequencies, by TensorFlow's own transform, which knows no 16 bits."""

    def build(self, shape: Any) -> None:
        self.weight = self.add_weight(shape=(shape[-1] // 2 + 1,), initializer="ones")

    def call(self, x: Any) -> Any:
        found = tf.signal.rfft(x) * tf.cast(self.weight, tf.complex64)
        return tf.signal.irfft(found, x.shape[-1:])


def test_a_layer_of_complex_numbers_that_takes_no_16_bits_is_named() -> None:
    found = verdict(Recipe(Policy.MIXED_FLOAT16, 16), Fourier)
    assert not found.accepted
    assert "fourier" in found.reason
    assert verdict(Recipe(Policy.MIXED_FLOAT16, 16, float32_modules=("fourier",)), Fourier).accepted
