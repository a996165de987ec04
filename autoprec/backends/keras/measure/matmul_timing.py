"""TensorFlow's matrix products and copies, for `autoprec.backends.shared.matmul_timing` to time."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from autoprec.core.dtypes import DType


class TensorFlowArithmetic:
    """Products on one TensorFlow device."""

    def __init__(self, device: str) -> None:
        self._device = device

    def prepare(self, dtype: DType, size: int) -> Any:
        """Make two operands; float32 is kept from running as TF32."""
        if dtype is DType.FLOAT8:
            raise ValueError(f"{dtype} products are not measured with TensorFlow")
        tf.config.experimental.enable_tensor_float_32_execution(dtype is DType.TF32)
        kind = tf.float32 if dtype is DType.TF32 else tf.as_dtype(dtype.value)
        with tf.device(self._device):
            a, b = (tf.random.stateless_normal((size, size), seed=(size, i)) for i in range(2))
            return tf.cast(a, kind), tf.cast(b, kind)

    def multiply(self, operands: Any) -> None:
        """Multiply, and wait: reading one element makes the device finish."""
        with tf.device(self._device):
            tf.linalg.matmul(*operands)[0, 0].numpy()

    def prepare_copy(self, size_bytes: int) -> Any:
        """Make two arrays of 2/3 of the size: adding in place reads both and writes one."""
        with tf.device(self._device):
            source = tf.ones(size_bytes * 2 // 3 // 4, tf.float32)
            return source, tf.Variable(source)

    def copy(self, operands: Any) -> None:
        """Add in place, and wait. (A plain copy would time the allocation of its result.)"""
        source, target = operands
        with tf.device(self._device):
            target.assign_add(source)[0].numpy()


def open_device(address: str) -> TensorFlowArithmetic:
    """Open "cpu" or "cuda:1"; raises ValueError where TensorFlow has no such device."""
    kind, _, number = address.partition(":")
    name = "GPU" if kind == "cuda" else kind.upper()
    devices = tf.config.list_physical_devices(name)
    index = int(number or 0)
    if index >= len(devices):
        raise ValueError(f"TensorFlow shows {len(devices)} {name} devices")
    return TensorFlowArithmetic(f"/{name}:{index}")
