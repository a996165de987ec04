"""What several tasks of the Keras zoo share: compiling, and batches of any size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np


def regression(inputs: Any, outputs: Any, rate: float = 1e-2, loss: Any = "mse") -> keras.Model:
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Adam(rate), loss)
    return model


def classifier(inputs: Any, outputs: Any, rate: float = 1e-2) -> keras.Model:
    return regression(inputs, outputs, rate, "sparse_categorical_crossentropy")


def batches(batch_size: int, make: Any, count: int = 64) -> Iterator[Any]:
    """`count` batches of `make(random, batch_size)`, the same ones every time."""
    random = np.random.default_rng(11)
    for _ in range(count):
        yield make(random, batch_size)


def normal(random: Any, *shape: int) -> Any:
    return random.normal(size=shape).astype("float32")
