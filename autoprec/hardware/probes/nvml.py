"""NVML read into plain values, despite its traps: bytes for text, missing calls, lost GPUs.

Source: NVML API reference (nvmlReturn_t); pynvml raises an `NVMLError` whose `value` is that code.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

#: nvmlReturn_t codes that mean "no usable device here" when NVML is opened.
_NO_DEVICE = {
    3: "not supported",
    4: "no permission",
    9: "the NVIDIA driver is not loaded",
    12: "the NVIDIA driver's library is not installed",
    18: "driver and library versions differ (reboot this machine)",
}

#: nvmlGpuVirtualizationMode_t: a vGPU inside a virtual machine.
_VGPU = 2


@dataclass(frozen=True)
class NvmlInstance:
    """One MIG instance of a GPU."""

    uuid: str
    name: str = ""
    memory_bytes: int | None = None


@dataclass(frozen=True)
class NvmlDevice:
    """One GPU as NVML shows it, in NVML's order (that of the PCI bus).

    `virtual`: a share of a GPU that a hypervisor assigns to a virtual machine (vGPU).
    """

    uuid: str
    name: str = ""
    compute_capability: str = ""
    memory_bytes: int | None = None
    mig: bool = False
    instances: tuple[NvmlInstance, ...] = ()
    virtual: bool = False


@dataclass(frozen=True)
class NvmlSnapshot:
    """Everything a probe reads from NVML."""

    driver: str = ""
    devices: tuple[NvmlDevice, ...] = ()
    notes: tuple[str, ...] = ()


def read_nvml(module: Any) -> NvmlSnapshot:
    """Read all GPUs through a pynvml module; what fails becomes a note."""
    try:
        module.nvmlInit()
    except Exception as error:
        why = _NO_DEVICE.get(getattr(error, "value", None) or 0, str(error))
        return NvmlSnapshot(notes=(f"NVML: {why}",))
    try:
        notes: list[str] = []
        ask = _NvmlCaller(module, notes)
        driver = ask.text("nvmlSystemGetDriverVersion")
        count = ask("nvmlDeviceGetCount") or 0
        devices = [_device(ask, index) for index in range(count)]
        return NvmlSnapshot(driver, tuple(d for d in devices if d), tuple(dict.fromkeys(notes)))
    finally:
        with contextlib.suppress(Exception):
            module.nvmlShutdown()


class _NvmlCaller:
    """Calls NVML functions by name; a failure is a note and None."""

    def __init__(self, module: Any, notes: list[str]) -> None:
        self._module = module
        self._notes = notes

    def __call__(self, name: str, *arguments: Any, quiet: bool = False) -> Any:
        try:
            function: Callable[..., Any] = getattr(self._module, name)
            return function(*arguments)
        except Exception as error:
            if not quiet:
                self._notes.append(f"NVML: {name}: {error}")
            return None

    def text(self, name: str, *arguments: Any, quiet: bool = False) -> str:
        """Call a function and return its answer as text: older pynvml returns bytes."""
        value = self(name, *arguments, quiet=quiet)
        if isinstance(value, bytes):
            return value.decode("utf-8", errors="replace")
        return str(value) if value is not None else ""

    def memory(self, handle: Any) -> int | None:
        """Return the total memory in bytes; None if unsupported (a GPU that shares the CPU's)."""
        info = self("nvmlDeviceGetMemoryInfo", handle)
        total = getattr(info, "total", None)
        return int(total) if total else None


def _device(ask: _NvmlCaller, index: int) -> NvmlDevice | None:
    handle = ask("nvmlDeviceGetHandleByIndex", index)
    if handle is None:
        return None
    capability = ask("nvmlDeviceGetCudaComputeCapability", handle)
    name = ask.text("nvmlDeviceGetName", handle)
    if capability is None and not name:
        return None
    mig = (ask("nvmlDeviceGetMigMode", handle, quiet=True) or (0, 0))[0] == 1
    return NvmlDevice(
        uuid=ask.text("nvmlDeviceGetUUID", handle),
        name=name,
        compute_capability=f"{capability[0]}.{capability[1]}" if capability else "",
        memory_bytes=ask.memory(handle),
        mig=mig,
        instances=_instances(ask, handle) if mig else (),
        virtual=ask("nvmlDeviceGetVirtualizationMode", handle, quiet=True) == _VGPU,
    )


def _instances(ask: _NvmlCaller, handle: Any) -> tuple[NvmlInstance, ...]:
    count = ask("nvmlDeviceGetMaxMigDeviceCount", handle, quiet=True) or 0
    instances = []
    for index in range(count):
        # NotFound is how NVML says that a slot is empty.
        part = ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, index, quiet=True)
        if part is None:
            continue
        instances.append(
            NvmlInstance(
                uuid=ask.text("nvmlDeviceGetUUID", part),
                name=ask.text("nvmlDeviceGetName", part, quiet=True),
                memory_bytes=ask.memory(part),
            )
        )
    return tuple(instances)
