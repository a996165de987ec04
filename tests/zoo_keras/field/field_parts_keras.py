"""What the Keras tasks in the shapes of real code share: batches by the seed, fixed teachers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np


def batches(make: Callable[[Any], Any], count: int = 300) -> Iterator[Any]:
    """Yield `count` batches of `make(random)`, drawn from a stream that numpy's seed begins."""
    random = np.random.default_rng(np.random.randint(2**31))
    for _ in range(count):
        yield make(random)


def normal(random: Any, *shape: int) -> Any:
    return random.normal(size=shape).astype("float32")


def fixed(*shape: int, seed: int = 5) -> Any:
    """Normal numbers that are the same in every run."""
    return normal(np.random.default_rng(seed), *shape)


def smooth(x: Any, seed: int = 5) -> Any:
    """Return a smooth function of the rows of `x`, of about unit size."""
    hidden = np.tanh(x @ fixed(x.shape[-1], 6, seed=seed))
    return hidden @ fixed(6, 1, seed=seed + 1) / 2


def perceptron(hidden: int, outputs: int, activation: str = "tanh") -> keras.Sequential:
    """Return a network of two hidden layers."""
    dense = keras.layers.Dense
    return keras.Sequential(
        [dense(hidden, activation=activation), dense(hidden, activation=activation), dense(outputs)]
    )


def compiled(model: keras.Model, rate: float, loss: Any = "mse") -> keras.Model:
    model.compile(keras.optimizers.Adam(rate), loss)
    return model


def in_float32(x: Any) -> Any:
    """End a model as Keras's guide to mixed precision does."""
    return keras.layers.Activation("linear", dtype="float32")(x)
