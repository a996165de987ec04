"""What TensorFlow says of pretended GPUs; what runs "on" them runs on the CPU.

Soft placement is TensorFlow's default, so `tf.device("/GPU:0")` computes on the CPU without a word:
here only the questions about devices are answered. A process that has not asked for memory growth
takes nearly all of each GPU the moment it first uses one, as TensorFlow's allocator does, and
finds none where another process has.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pretended import settings

#: What a process takes of a GPU that it uses: all but a little, or its context where memory grows.
_ALL_BUT, _CONTEXT = 0.05, 512 * 2**20


class Device(NamedTuple):
    """A device as tf.config names it."""

    name: str
    device_type: str


GPUS = [Device(f"/physical_device:GPU:{i}", "GPU") for i in range(len(settings.GPUS))]
_LOGICAL = [Device(f"/device:GPU:{i}", "GPU") for i in range(len(settings.GPUS))]
_growing: set[str] = set()
_used: list[bool] = []


def _asked(known: Callable[..., list[Any]], ours: list[Device]) -> Callable[..., list[Any]]:
    def devices(device_type: str | None = None) -> list[Any]:
        return known(device_type) + (ours if device_type in (None, "GPU") else [])

    return devices


def _use(errors: Any) -> None:
    """Take memory of every GPU, once; an error where there is too little left."""
    if _used:
        return
    _used.append(True)
    grows = os.environ.get("TF_FORCE_GPU_ALLOW_GROWTH") == "true"
    for device, gpu in zip(GPUS, settings.GPUS, strict=True):
        books = Path(settings.FOLDER).glob(f"{gpu['uuid']}.*")
        held = gpu["others"] + sum(int(b.read_text() or 0) for b in books if _lives(b))
        free = gpu["bytes"] - held
        wanted = _CONTEXT if grows or device.name in _growing else int(free * (1 - _ALL_BUT))
        if free < _CONTEXT:
            raise errors.InternalError(
                None, None, "CUDA_ERROR_OUT_OF_MEMORY: out of memory: cuDevicePrimaryCtxRetain"
            )
        Path(settings.FOLDER, f"{gpu['uuid']}.{os.getpid()}").write_text(str(wanted))


def _lives(book: Path) -> bool:
    return Path("/proc", book.suffix[1:]).exists()


def install(tf: Any) -> None:
    """Answer for the GPUs; once, after `import tensorflow`."""
    config, experimental = tf.config, tf.config.experimental
    physical = _asked(config.list_physical_devices, GPUS)
    logical = _asked(config.list_logical_devices, _LOGICAL)
    config.list_physical_devices = experimental.list_physical_devices = physical
    config.list_logical_devices = experimental.list_logical_devices = logical
    real = tf.device

    def device(name: Any) -> Any:
        if "GPU" in str(name).upper():
            _use(tf.errors)
        return real(name)

    tf.device = device
    grow, details = experimental.set_memory_growth, experimental.get_device_details

    def set_memory_growth(gpu: Any, enable: bool) -> None:
        if gpu not in GPUS:
            grow(gpu, enable)
        elif _used:
            raise RuntimeError("Physical devices cannot be modified after being initialized")
        elif enable:
            _growing.add(gpu.name)

    def get_device_details(gpu: Any) -> dict[str, Any]:
        if gpu not in GPUS:
            return dict(details(gpu))
        given = settings.GPUS[GPUS.index(gpu)]
        major, minor = (int(part) for part in given["capability"].split("."))
        return {"device_name": given["name"], "compute_capability": (major, minor)}

    experimental.set_memory_growth = set_memory_growth
    experimental.get_memory_growth = lambda gpu: gpu.name in _growing
    experimental.get_device_details = get_device_details
    experimental.get_memory_info = lambda name: {"current": 1 << 20, "peak": 4 << 20}
    experimental.reset_memory_stats = lambda name: None
