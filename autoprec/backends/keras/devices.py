"""The devices that the library below Keras can train on, and how work is placed on one."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import keras

from autoprec.core.device.observation import DeviceKind
from autoprec.errors import UsageError

_GPUS = (DeviceKind.CUDA, DeviceKind.ROCM)


def on_tensorflow() -> bool:
    """Say whether Keras runs on TensorFlow here (else: on torch)."""
    return bool(keras.config.backend() == "tensorflow")


@contextlib.contextmanager
def placed_on(device: str) -> Iterator[None]:
    """Put what is built and run inside on `device`: "cpu", "cuda" (TensorFlow's GPU) or "tpu"."""
    if device == "tpu":
        with tpu_strategy().scope():
            yield
    elif on_tensorflow():
        import tensorflow as tf

        with tf.device(_tensorflow_device(device)):
            yield
    else:
        with keras.device(device if device != "cuda" else "cuda:0"):
            yield


def _tensorflow_device(device: str) -> str:
    kind, _, index = device.partition(":")
    names = {"cpu": "CPU", "cuda": "GPU", "gpu": "GPU", "rocm": "GPU"}
    if kind not in names:
        raise UsageError(f"device {device!r} given, expected one of cpu, cuda, tpu")
    return f"/{names[kind]}:{index or 0}"


@functools.cache
def tpu_strategy() -> Any:
    """Return this VM's TPUStrategy, made once: initialising TPUs again clears their memory.

    `tpu="local"` is TensorFlow's documented name for them; without it the resolver asks a metadata
    server, which elsewhere never answers.
    """
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TPUClusterResolver(tpu="local")
    tf.config.experimental_connect_to_cluster(resolver)
    tf.tpu.experimental.initialize_tpu_system(resolver)
    return tf.distribute.TPUStrategy(resolver)


def devices() -> list[str]:
    """List the devices Keras's backend can train on here, best first."""
    if on_tensorflow():
        import tensorflow as tf

        found = [
            name
            for name, kind in (("tpu", "TPU"), ("cuda", "GPU"))
            if tf.config.list_physical_devices(kind)
        ]
    else:
        import torch

        found = ["cuda"] if torch.cuda.is_available() else []
    return [*found, "cpu"]


def built_for() -> tuple[DeviceKind, ...]:
    """List the kinds of GPU that Keras's backend was built for, whether here or not."""
    if not on_tensorflow():
        import torch

        built = (torch.version.cuda is not None, torch.version.hip is not None)
    else:
        import tensorflow as tf

        built = (tf.test.is_built_with_cuda(), tf.test.is_built_with_rocm())
    return tuple(kind for kind, is_built in zip(_GPUS, built, strict=True) if is_built)


def device_of(model: Any) -> str:
    """Return where a model's first weight is ("cpu", "cuda:0", "tpu"), or would be built."""
    weights = model.weights if isinstance(model, keras.Layer) else []
    if not weights:
        return devices()[0]
    name = str(getattr(weights[0].value, "device", "")).rpartition("device:")[2].lower()
    kind, _, index = name.partition(":")
    if kind in ("gpu", "cuda"):
        return f"cuda:{index or 0}"
    return kind or "cpu"
