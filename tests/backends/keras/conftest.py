"""Keras tests run on TensorFlow on the CPU, in a process of their own, with small models."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TensorFlow warns about its own imports
    import keras
    import tensorflow as tf


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Every test starts with a seed, no leftover names, and the default policy."""
    keras.utils.clear_session(
        free_memory=False
    )  # collecting garbage would take longer than most tests
    keras.utils.set_random_seed(7)
    before = keras.config.dtype_policy()
    yield
    assert keras.config.dtype_policy() == before, "a test left a global policy behind"
    tf.config.run_functions_eagerly(False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Allow what Keras itself warns about: numpy 2 reading TensorFlow's eager tensors."""
    own = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
    for item in items:
        if "keras" in item.path.parts:
            item.add_marker(own)
