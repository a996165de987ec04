"""The backend contract for Keras on TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest
from contract import BackendContract, Subject

from autoprec.backends import registry
from autoprec.backends.protocol import Task


def build_model() -> keras.Model:
    model = keras.Sequential(
        [
            keras.layers.Input((6,)),
            keras.layers.Dense(16, activation="tanh"),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.Adam(1e-2), "sparse_categorical_crossentropy")
    return model


def build_data(batch_size: int) -> Iterator[tuple[Any, Any]]:
    for _ in range(16):
        inputs = np.random.normal(size=(batch_size, 6)).astype("float32")
        yield inputs, inputs[:, :3].argmax(axis=1)


def fail() -> keras.Model:
    raise ZeroDivisionError("the user's own")


class TestKeras(BackendContract):
    @pytest.fixture
    def subject(self) -> Subject:
        task = Task("task.py", build_model, build_data)
        return Subject(registry.load("keras"), task, lambda: replace(task, build_model=fail))
