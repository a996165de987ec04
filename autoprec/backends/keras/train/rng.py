"""Random numbers: the same in every dtype, and in streams of their own.

Keras draws a dropout mask in the dtype of what it drops from, so the same seed gives a bfloat16
model another mask than a float32 one. Inside `same_in_every_dtype` numbers are drawn in float32 and
then cast. This holds for `keras.random` and every layer built on it, not for a model's own calls of
the library below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
from keras.src.backend import random as keras_random
from keras.src.backend.common import global_state
from keras.src.random import seed_generator
from keras.src.utils import rng_utils

from autoprec.backends.keras.dtypes import is_low
from autoprec.backends.shared.rng_streams import HostGenerators


@contextmanager
def same_in_every_dtype() -> Iterator[None]:
    """Draw in float32 what is traced or run inside."""
    before = {name: getattr(keras_random, name) for name in ("dropout", *_BY_DTYPE)}
    keras_random.dropout = _dropout(before["dropout"])
    for name in _BY_DTYPE:
        setattr(keras_random, name, _drawn_in_float32(before[name]))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(keras_random, name, function)


_BY_DTYPE = ("normal", "uniform", "truncated_normal")


def _dropout(original: Callable[..., Any]) -> Callable[..., Any]:
    def dropout(inputs: Any, rate: Any, noise_shape: Any = None, seed: Any = None) -> Any:
        if not is_low(inputs.dtype):
            return original(inputs, rate, noise_shape, seed)
        ones = keras.ops.ones_like(inputs, dtype="float32")
        mask = original(ones, rate, noise_shape, seed)
        return keras.ops.multiply(inputs, keras.ops.cast(mask, inputs.dtype))

    return dropout


def _drawn_in_float32(original: Callable[..., Any]) -> Callable[..., Any]:
    def draw(*args: Any, dtype: Any = None, **kwargs: Any) -> Any:
        if not is_low(dtype):
            return original(*args, dtype=dtype, **kwargs)
        return keras.ops.cast(original(*args, dtype="float32", **kwargs), dtype)

    return draw


class KerasGenerators:
    """Every generator that a Keras task's data may draw from; see `Generators`.

    They are Python's and NumPy's, Keras's global one, and that of the library below: TensorFlow's
    for what is run eagerly, or torch's on the CPU. Keras's and TensorFlow's are swapped as objects.
    """

    _KERAS = (rng_utils.GLOBAL_RANDOM_SEED, seed_generator.GLOBAL_SEED_GENERATOR)

    def __init__(self) -> None:
        self._host = HostGenerators()

    def capture(self) -> Any:
        """Return their state at this moment."""
        own = [global_state.get_global_attribute(name) for name in self._KERAS]
        return self._host.capture(), own, _capture_library()

    def restore(self, state: Any) -> None:
        """Go back to a captured state."""
        host, own, library = state
        self._host.restore(host)
        for name, value in zip(self._KERAS, own, strict=True):
            global_state.set_global_attribute(name, value)
        _restore_library(library)


def _capture_library() -> Any:
    if keras.config.backend() == "torch":
        import torch

        return torch.get_rng_state()
    eager = _eager_context()
    return eager._seed, getattr(eager, "_rng", None)  # without a seed so far there is none


def _restore_library(state: Any) -> None:
    if keras.config.backend() == "torch":
        import torch

        torch.set_rng_state(state)
        return
    eager = _eager_context()
    eager._seed, eager._rng = state


def _eager_context() -> Any:
    """Return what holds TensorFlow's global seed and the generator of operations' seeds."""
    from tensorflow.python.eager import context

    return context.context()
