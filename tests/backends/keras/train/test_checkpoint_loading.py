"""A task with a checkpoint begins with its weights; what does not fit is an error with its name."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from autoprec.backends.keras.train.data import batches
from autoprec.backends.keras.train.task_runner import build_model
from autoprec.backends.protocol import Task
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import LossScale, Recipe
from autoprec.errors import TaskError
from tests.backends.keras.keras_models import compiled, data, softmax_net

BFLOAT16 = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=8)
FLOAT16 = Recipe(policy=Policy.MIXED_FLOAT16, batch_size=8, loss_scale=LossScale(initial=2.0**10))
QUIET: Any = lambda *_: None  # noqa: E731


def task(build_model: Any, build_data: Any = lambda n: data(32), **more: Any) -> Task:
    return Task(name="task.py", build_model=build_model, build_data=build_data, **more)


@pytest.mark.parametrize("name", ["last.weights.h5", "last.keras"])
def test_a_task_with_a_checkpoint_builds_trained_models_whatever_the_seed(name, tmp_path):
    trained = compiled(softmax_net())
    for weight in trained.weights:
        weight.assign(weight + 0.25)
    (trained.save if name.endswith(".keras") else trained.save_weights)(tmp_path / name)
    given = task(lambda: compiled(softmax_net()), checkpoint=tmp_path / name)
    batch = next(batches(given, 8, 0))
    for seed in (0, 1):
        built = build_model(given, seed, batch)
        for ours, theirs in zip(built.weights, trained.weights, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def other_net() -> Any:
    inputs = keras.Input((4,))
    return keras.Model(inputs, keras.layers.Dense(3)(inputs))


@pytest.mark.parametrize(
    ("name", "save", "told"),
    [
        (
            "other.weights.h5",
            lambda path: other_net().save_weights(path),
            "does not fit the model.*dense",
        ),
        ("torn.keras", lambda path: path.write_bytes(b"PK torn"), "does not fit the model"),
        ("last.ckpt", lambda path: path.write_bytes(b""), "not a Keras weights file"),
    ],
)
def test_a_checkpoint_that_cannot_be_loaded_is_an_error_with_its_name(name, save, told, tmp_path):
    save(tmp_path / name)
    given = task(lambda: compiled(softmax_net()), checkpoint=tmp_path / name)
    with pytest.raises(TaskError, match=f"{name}.*{told}"):
        build_model(given, 0, next(batches(given, 8, 0)))
