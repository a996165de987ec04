"""The proof of a Keras task: state that only evaluation reads, and splitting, by its verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
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


def verdict(recipe: Recipe, *layers: Callable[[], Any]) -> Any:
    task = Task(name="task.py", build_model=lambda: network(*layers), build_data=batches)
    tracer = KerasBackend().tracer(task, device="cpu", seed=0, report=lambda *_: None)
    return Proof(tracer, steps=8).prove(recipe)


def test_sums_that_steps_round_are_drift_and_named() -> None:
    found = verdict(Recipe(Policy.MIXED_BFLOAT16, 16), lambda: Squares(careful=False))
    assert found.verdict == "drift"
    assert "squares/total" in found.reason
    assert verdict(Recipe(Policy.MIXED_BFLOAT16, 16), lambda: Squares(careful=True)).accepted


def test_a_split_batch_whose_samples_mix_is_compared_with_the_whole_one() -> None:
    """Float32 that is split is no reference, though it computes in float32."""
    split = Recipe(batch_size=8, accumulation_steps=2)
    found = verdict(split, keras.layers.BatchNormalization)
    assert found.verdict == "rejected"
    assert "2 micro-batches of 8" in found.reason
    assert verdict(split).accepted
