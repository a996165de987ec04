"""Keras behind the seam: names it and hands out its session, tracer and surgeon."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterable, Mapping

import keras

from autoprec.backends.keras import devices
from autoprec.backends.keras.capabilities import CAPABILITIES
from autoprec.backends.protocol import (
    DeviceMemory,
    ProgressCallback,
    Session,
    Surgeon,
    Task,
    Tracer,
)
from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.core.measurement import TaskFacts
from autoprec.core.recipe import Recipe
from autoprec.errors import UsageError


def require_backend() -> None:
    """Raise `UsageError` where Keras runs on something else than TensorFlow or torch."""
    below = keras.config.backend()
    if below not in ("tensorflow", "torch"):
        raise UsageError(
            f"Keras runs on {below!r} here, expected 'tensorflow' or 'torch': set "
            "KERAS_BACKEND=tensorflow before keras is imported"
        )


class KerasBackend:
    """See `autoprec.backends.protocol.Backend`; Keras 3 on TensorFlow, or on torch."""

    name = "keras"
    capabilities = CAPABILITIES

    def __init__(self) -> None:
        require_backend()

    def versions(self) -> Mapping[str, str]:
        """Return the versions of Python, Keras, and the library Keras runs on."""
        below = str(keras.config.backend())
        found = {"python": platform.python_version(), "keras": str(keras.__version__)}
        if below == "tensorflow":
            import tensorflow as tf

            found["tensorflow"] = str(tf.__version__)
        else:
            found[below] = importlib.metadata.version(below)
        return found

    def devices(self) -> Iterable[str]:
        """List the TPUs and GPUs that the library below Keras can use here, then the CPU."""
        return devices.devices()

    def trains_on(self) -> Iterable[DeviceKind]:
        """List CPUs, NVIDIA's and AMD's GPUs, and, on TensorFlow, TPUs."""
        tpu = (DeviceKind.TPU,) if devices.on_tensorflow() else ()
        return (DeviceKind.CPU, DeviceKind.CUDA, DeviceKind.ROCM, *tpu)

    def built_for(self) -> Iterable[DeviceKind]:
        """List the kinds of GPU that the library below Keras was built for."""
        return devices.built_for()

    def observe(self, device: str) -> Observation | None:
        """Return None: TensorFlow's details of a device do not name its family."""
        return None

    def memory(self, device: str) -> DeviceMemory | None:
        """Return None: TensorFlow tells what it holds itself, not what is free."""
        return None

    def missing_kernels(self, device: str) -> str:
        """Say what keeps 16-bit products on a CPU from oneDNN; empty if nothing does."""
        below = keras.config.backend()
        off = os.environ.get("TF_ENABLE_ONEDNN_OPTS", "").lower() in ("0", "false")
        if device != "cpu" or below != "tensorflow" or not off:
            return ""
        return "TF_ENABLE_ONEDNN_OPTS is off: TensorFlow computes without oneDNN"

    def device_of(self, model: object) -> str:
        """Return the device of the model's first weight; without any, the preferred one."""
        return devices.device_of(model)

    def describe(
        self, task: Task, *, device: str, seed: int, batch_size: int, report: ProgressCallback
    ) -> TaskFacts:
        """See `Backend.describe`."""
        from autoprec.backends.keras.measure.describe import describe

        return describe(
            task,
            device=device,
            seed=seed,
            batch_size=batch_size,
            report=report,
            software=self.versions(),
        )

    def open(
        self, task: Task, recipe: Recipe, *, device: str, seed: int, report: ProgressCallback
    ) -> Session:
        """See `Backend.open`."""
        from autoprec.backends.keras.measure.session import KerasSession

        return KerasSession(task, recipe, device=device, seed=seed, report=report)

    def tracer(self, task: Task, *, device: str, seed: int, report: ProgressCallback) -> Tracer:
        """See `Backend.tracer`."""
        from autoprec.backends.keras.trace.tracer import keras_tracer

        return keras_tracer(task, device=device, seed=seed, report=report)

    def surgeon(self) -> Surgeon:
        """See `Backend.surgeon`."""
        from autoprec.backends.keras.surgeon import KerasSurgeon

        return KerasSurgeon()
