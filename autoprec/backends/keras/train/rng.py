"""Makes random numbers the same in every dtype, so that two precisions can be compared.

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

_SIXTEEN_BIT = ("float16", "bfloat16")


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
        dtype = keras.backend.standardize_dtype(inputs.dtype)
        if dtype not in _SIXTEEN_BIT:
            return original(inputs, rate, noise_shape, seed)
        ones = keras.ops.ones_like(inputs, dtype="float32")
        mask = original(ones, rate, noise_shape, seed)
        return keras.ops.multiply(inputs, keras.ops.cast(mask, dtype))

    return dropout


def _drawn_in_float32(original: Callable[..., Any]) -> Callable[..., Any]:
    def draw(*args: Any, dtype: Any = None, **kwargs: Any) -> Any:
        if dtype is None or keras.backend.standardize_dtype(dtype) not in _SIXTEEN_BIT:
            return original(*args, dtype=dtype, **kwargs)
        return keras.ops.cast(original(*args, dtype="float32", **kwargs), dtype)

    return draw
