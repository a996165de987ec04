"""The Keras zoo runs like the Keras backend's other tests."""

from __future__ import annotations

import os
import warnings

import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TensorFlow warns about its own imports
    import keras  # noqa: F401
    import tensorflow as tf  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Allow what Keras itself warns about: numpy 2 reading TensorFlow's eager tensors."""
    own = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
    for item in items:
        if "zoo_keras" in item.path.parts:
            item.add_marker(own)
            item.add_marker(pytest.mark.keras)
