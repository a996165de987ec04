"""NVIDIA GPUs: those CUDA shows this process, in its order, with what NVML knows of them.

NVML counts every GPU of the machine in the order of the PCI bus; CUDA counts the visible ones, the
fastest first unless CUDA_DEVICE_ORDER=PCI_BUS_ID. Where NVML is missing or ambiguous, CUDA itself
is asked, which takes longer. Whether a GPU is present at all is seen without any driver library.

Sources of the latter: NVIDIA driver README, "The /proc file system interface" and "Device files"
(nvidia0); Jetson Linux developer guide (nvhost and nvgpu device files, nvmap); Microsoft, "GPU
accelerated machine learning in WSL" (/dev/dxg, and libcuda in /usr/lib/wsl/lib).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from autoprec.core.device.observation import UNIFIED_MEMORY_NOTE, DeviceKind, Observation
from autoprec.hardware.machine import Machine
from autoprec.hardware.probes import Findings
from autoprec.hardware.probes.cuda_driver import CudaAnswer, CudaDevice, read_cuda
from autoprec.hardware.probes.cuda_visibility import VisibleDevice, find_in_nvml, visible_devices
from autoprec.hardware.probes.nvml import NvmlDevice, NvmlSnapshot, read_nvml
from autoprec.hardware.probes.pci import gpus_on_the_bus, names_a_device, no_visible_device

_VENDOR = "10de"
_FILES = re.compile(r"nvidia\d+|nvmap|nvgpu|nvhost-.*gpu.*")
_WSL_FOLDER = "/usr/lib/wsl/lib"


def probe_nvidia(machine: Machine) -> Findings:
    """Observe the NVIDIA GPUs that CUDA would show this process."""
    try:
        module = machine.nvml()
    except ImportError as error:
        return _without_nvml(machine, f"pynvml cannot be imported: {error}")
    snapshot = read_nvml(module)
    if not snapshot.devices:
        return _without_nvml(machine, "; ".join(snapshot.notes))
    chosen = machine.variable("CUDA_VISIBLE_DEVICES")
    targets, notes = visible_devices(snapshot, chosen)
    if not targets:
        return no_visible_device(DeviceKind.CUDA, "; ".join((*snapshot.notes, *notes)), chosen)
    ambiguous = _order_is_ambiguous(machine, snapshot.devices)
    if ambiguous or any(gpu.mig or not gpu.compute_capability for gpu in snapshot.devices):
        answer = read_cuda(machine)
        if answer.devices:
            return Findings(_observed(answer, snapshot), snapshot.notes)
    if ambiguous:
        notes = (*notes, _ORDER_NOTE)
    devices = tuple(_observe(i, target, snapshot.driver) for i, target in enumerate(targets))
    return Findings(devices, (*snapshot.notes, *notes))


def _without_nvml(machine: Machine, why: str) -> Findings:
    """Ask CUDA where NVML shows nothing; find nothing if there is no GPU, as on most machines."""
    if not _is_present(machine):
        return Findings()
    why = why or "NVML shows none"
    reasons = [why, _driver_remark(machine)]
    if nvidia_expected(machine):
        answer = read_cuda(machine)
        if answer.devices:
            return Findings(
                _observed(_without_single_identifier(answer), NvmlSnapshot()),
                (f"{why}; used CUDA's driver instead",),
            )
        reasons.append(answer.error or "CUDA shows none")
    said = "; ".join(filter(None, reasons))
    said = f"this machine has an NVIDIA GPU that cannot be used: {said}"
    return no_visible_device(DeviceKind.CUDA, said, machine.variable("CUDA_VISIBLE_DEVICES"))


def _without_single_identifier(answer: CudaAnswer) -> CudaAnswer:
    """Drop the identifier of a single device: not every CUDA accepts it (Jetson's may not)."""
    if len(answer.devices) > 1:
        return answer
    return replace(answer, devices=tuple(replace(each, uuid="") for each in answer.devices))


_ORDER_NOTE = (
    "GPUs of different models: CUDA may number them differently (fastest first); "
    "set CUDA_DEVICE_ORDER=PCI_BUS_ID"
)


def _order_is_ambiguous(machine: Machine, gpus: Sequence[NvmlDevice]) -> bool:
    by_bus = machine.variable("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    return not by_bus and len({gpu.name for gpu in gpus}) > 1


def _observed(answer: CudaAnswer, snapshot: NvmlSnapshot) -> tuple[Observation, ...]:
    """Combine CUDA's devices, in its order, with what NVML knows about each."""
    return tuple(
        _observe(
            i, find_in_nvml(device, snapshot), snapshot.driver or f"CUDA {answer.version}", device
        )
        for i, device in enumerate(answer.devices)
    )


def _observe(
    index: int, target: VisibleDevice, driver: str, cuda: CudaDevice | None = None
) -> Observation:
    """Observe one device, by NVML and, if it was asked, by CUDA."""
    part = target.instance
    cuda = cuda or CudaDevice()
    memory = (part.memory_bytes if part else target.gpu.memory_bytes) or cuda.memory_bytes
    unified = cuda.integrated or memory is None
    return Observation(
        kind=DeviceKind.CUDA,
        index=index,
        name=target.gpu.name or cuda.model,
        vendor="NVIDIA",
        compute_capability=target.gpu.compute_capability or cuda.compute_capability,
        memory_bytes=None if unified else memory,
        uuid=target.uuid or cuda.identifier,
        driver=driver,
        partition=target.partition or cuda.partition,
        notes=(UNIFIED_MEMORY_NOTE,) if unified else (),
    )


# Presence --------------------------------------------------------------------------------------


def _is_present(machine: Machine) -> bool:
    """Return whether anything shows that this machine has an NVIDIA GPU."""
    if gpus_on_the_bus(machine, _VENDOR) or machine.entries("/proc/driver/nvidia/gpus"):
        return True
    files = machine.entries("/dev")
    if any(_FILES.fullmatch(name) for name in files):
        return True
    return "dxg" in files and "libcuda.so.1" in machine.entries(_WSL_FOLDER)


def nvidia_expected(machine: Machine) -> bool:
    """Return whether an NVIDIA GPU is present and not hidden on purpose."""
    return _is_present(machine) and names_a_device(machine.variable("CUDA_VISIBLE_DEVICES"))


def _driver_remark(machine: Machine) -> str:
    """Return a remark on GPUs that another driver than NVIDIA's holds; "" if there are none."""
    drivers = {gpu.driver for gpu in gpus_on_the_bus(machine, _VENDOR)}
    return "it uses the nouveau driver; install NVIDIA's driver" if "nouveau" in drivers else ""
