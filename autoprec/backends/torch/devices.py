"""What a torch device offers besides computing: its index, its memory, its clock.

Every kind of accelerator has a torch module of its own (`torch.cuda`, also for ROCm, `torch.xpu`,
`torch.mps`), and they differ: Metal counts no peak, only what its driver has allocated, which the
caching allocator returns when told to. What a kind cannot tell is None here. The CPU's memory is in
`autoprec.backends.shared.process_memory`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autoprec.backends.protocol import USABLE_FREE_MEMORY_SHARE
from autoprec.backends.torch import xpu_devices
from autoprec.core.device.observation import DeviceKind, Observation, kind_of_framework_device


def resolve_device(device: str | torch.device) -> torch.device:
    """Return the device with its index.

    "cuda" is the current CUDA device, "xpu" the one that the process was put on. Several functions
    of `torch.cuda` need an index (`set_per_process_memory_fraction`), and "cuda" and "cuda:0" do
    not compare equal.
    """
    found = torch.device(device)
    index: int | None = found.index
    if index is not None or found.type not in ("cuda", "xpu"):
        return found
    if found.type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    assigned = xpu_devices.select_assigned_device()
    if assigned is None:
        raise RuntimeError("torch does not list the Intel GPU that this process was assigned")
    return torch.device("xpu", assigned)


def built_for() -> tuple[DeviceKind, ...]:
    """List the kinds of accelerator that this build of torch supports, present or not."""
    built = {
        DeviceKind.CUDA: torch.version.cuda is not None,
        DeviceKind.ROCM: torch.version.hip is not None,
        DeviceKind.XPU: torch.xpu._is_compiled(),
        DeviceKind.MPS: torch.backends.mps.is_built(),
    }
    return tuple(kind for kind, is_built in built.items() if is_built)


def synchronize(device: torch.device) -> None:
    """Wait for everything that was launched; the CPU has nothing to wait for."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def has_float64(device: torch.device) -> bool:
    """Return whether the device computes in float64: Metal never does, some Intel GPUs do."""
    if device.type == "xpu":
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type != "mps"


def observe(device: torch.device) -> Observation | None:
    """Return what torch says of a GPU; None for a device it has no properties of."""
    if device.type not in ("cuda", "xpu"):
        return None
    found: Any = _torch_module(device).get_device_properties(device)
    kind = DeviceKind(kind_of_framework_device(device.type, built_for()))
    capability = f"{found.major}.{found.minor}" if kind is DeviceKind.CUDA else ""
    on_xpu = kind is DeviceKind.XPU
    identity = xpu_devices.identify_device(device.index) if on_xpu else xpu_devices.XpuDevice()
    return Observation(
        kind=kind,
        index=device.index,
        name=str(found.name),
        vendor={"cuda": "NVIDIA", "rocm": "AMD", "xpu": "Intel"}[kind.value],
        architecture=str(found.gcnArchName).partition(":")[0] if kind is DeviceKind.ROCM else "",
        compute_capability=capability,
        memory_bytes=int(found.total_memory),
        pci=identity.pci,
        uuid=identity.address,
    )


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes this process may have on an accelerator: free, or its own already.

    The caching allocator's own blocks do not count as free for the driver, but serve the next
    tensor. None for the CPU, and where the kind does not tell.
    """
    if device.type in ("cuda", "xpu"):
        books = _torch_module(device)
        try:
            free, _ = books.mem_get_info(device)
        except (RuntimeError, AttributeError):  # some Intel drivers do not tell
            return None
        return int(free) + int(books.memory_reserved(device))
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory())
    return None


def used_by_others(device: torch.device) -> int | None:
    """Return the bytes that other processes and the driver hold; None where unknown."""
    if device.type not in ("cuda", "xpu"):
        return None
    free = free_bytes(device)
    return None if free is None else int(_torch_module(device).mem_get_info(device)[1]) - free


def limit_memory(device: torch.device) -> None:
    """Limit this process's memory, so that it gets an exception before the device is full."""
    free = free_bytes(device)
    if free is None:
        return
    if device.type == "mps":
        torch.mps.set_per_process_memory_fraction(USABLE_FREE_MEMORY_SHARE)
        return
    books = _torch_module(device)
    total = books.mem_get_info(device)[1]
    set_fraction = getattr(books, "set_per_process_memory_fraction", None)
    if set_fraction is not None:  # torch.xpu has it since 2.9
        set_fraction(min(1.0, USABLE_FREE_MEMORY_SHARE * free / total), device)


def reset_peak(device: torch.device) -> None:
    """Restart the count of an accelerator's peak memory."""
    if device.type in ("cuda", "xpu"):
        _torch_module(device).reset_peak_memory_stats(device)
    elif device.type == "mps":
        torch.mps.empty_cache()


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory on an accelerator since `reset_peak`, cached blocks included."""
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    return int(_torch_module(device).max_memory_reserved(device))


def empty_cache(device: torch.device) -> None:
    """Return freed memory to an accelerator's driver; the CPU caches none."""
    if device.type != "cpu":
        _torch_module(device).empty_cache()


def event_maker(device: torch.device) -> Callable[[], Any] | None:
    """Return what makes timing events on the device's stream; None where there are none."""
    if device.type not in ("cuda", "xpu"):
        return None
    event = _torch_module(device).Event
    return lambda: event(enable_timing=True)


def _torch_module(device: torch.device) -> Any:
    return getattr(torch, device.type)
