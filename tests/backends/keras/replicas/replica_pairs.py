"""A model on two replicas and the same one in a single process, for the cases on_replicas runs."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from autoprec.backends.keras.surgeon import KerasSurgeon
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import LossScale, Recipe
from autoprec.errors import AutoprecWarning
from tests.backends.keras.keras_models import data, softmax_net

CASES: dict[str, Callable[[], None]] = {}
FLOAT16 = Recipe(policy=Policy.MIXED_FLOAT16, loss_scale=LossScale(initial=64.0))


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


class CountedReductions(tf.distribute.ReductionToOneDevice):
    """Counts how often gradients are reduced, inside the step."""

    def __init__(self) -> None:
        super().__init__()
        self.count = tf.Variable(0, dtype=tf.int64)

    def batch_reduce_implementation(self, reduce_op: Any, pairs: Any, options: Any) -> Any:
        if any(value.values[0].shape.rank for value, _ in pairs):
            self.count.assign_add(1)
        return super().batch_reduce_implementation(reduce_op, pairs, options)


@functools.cache
def mirrored() -> Any:
    """Return the one strategy: TensorFlow confuses the reductions of two on the same devices."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def sgd(**arguments: Any) -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9, **arguments)


def on(replicas: Any, recipe: Recipe, build: Callable[[], Any]) -> tuple[Any, Any]:
    """Return a seeded model and its Precision, applied outside the scope as in a script."""
    keras.utils.set_random_seed(3)
    if replicas is None:
        model = build()
        model.run_eagerly = True  # what replicas are compared with needs no graph
    else:
        with replicas.scope():
            model = build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoprecWarning)
        return model, KerasSurgeon().apply(recipe, model=model)


def both(recipe: Recipe, build: Callable[[], Any]) -> list[tuple[Any, Any]]:
    return [on(None, recipe, build), on(mirrored(), recipe, build)]


def assert_equal(one: Any, two: Any, atol: float = 1e-5) -> None:
    for ours, theirs in zip(two.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=atol, rtol=0)


def fit(model: Any, precision: Any, samples: int, **arguments: Any) -> list[float]:
    x, y = data(samples)
    size = precision.global_batch_size
    fitted = model.fit(x, y, size, shuffle=False, epochs=2, verbose=0, **arguments)
    return list(fitted.history["loss"])


def fits_are_equal(recipe: Recipe, samples: int, build: Any, atol: float = 1e-5) -> list[Any]:
    pairs = both(recipe, build)
    trained_alike(pairs, samples, atol)
    return [precision for _, precision in pairs]


def trained_alike(pairs: list[tuple[Any, Any]], samples: int, atol: float = 1e-5) -> None:
    """Train both models of `both` on as many samples, and find the same in both."""
    losses = [fit(model, precision, samples) for model, precision in pairs]
    np.testing.assert_allclose(losses[1], losses[0], atol=atol, rtol=0)
    assert_equal(pairs[0][0], pairs[1][0], atol)
    assert pairs[0][1].steps == pairs[1][1].steps


def net(**optimizer: Any) -> Callable[[], Any]:
    return lambda: softmax_net(optimizer=sgd(**optimizer))
