"""NVIDIA GPUs: those CUDA shows this process, in its order, with what NVML knows of them.

NVML counts every GPU of the machine in the order of the PCI bus; CUDA counts the visible ones, the
fastest first unless CUDA_DEVICE_ORDER=PCI_BUS_ID. Where NVML leaves a doubt, or is not there, CUDA
itself is asked, which takes longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoprec.core.device.facts import UNIFIED_MEMORY_NOTE, DeviceKind, Observation
from autoprec.hardware.machine import Machine
from autoprec.hardware.probes import Seen
from autoprec.hardware.probes.cuda import CudaAnswer, CudaDevice, read_cuda
from autoprec.hardware.probes.cuda_visibility import Target, matching, shown
from autoprec.hardware.probes.nvidia_signs import (
    nvidia_present,
    nvidia_wanted,
    without_its_driver,
)
from autoprec.hardware.probes.nvml import NvmlDevice, NvmlSnapshot, read_nvml
from autoprec.hardware.probes.pci import nothing_shown


def probe_nvidia(machine: Machine) -> Seen:
    """Observe the NVIDIA GPUs that CUDA would show this process."""
    try:
        module = machine.nvml()
    except ImportError as error:
        return _without_nvml(machine, f"pynvml cannot be imported: {error}")
    snapshot = read_nvml(module)
    if not snapshot.devices:
        return _without_nvml(machine, "; ".join(snapshot.notes))
    chosen = machine.variable("CUDA_VISIBLE_DEVICES")
    targets, notes = shown(snapshot, chosen)
    if not targets:
        return nothing_shown(DeviceKind.CUDA, "; ".join((*snapshot.notes, *notes)), chosen)
    mixed = _may_be_numbered_otherwise(machine, snapshot.devices)
    if mixed or any(gpu.mig or not gpu.compute_capability for gpu in snapshot.devices):
        answer = read_cuda(machine)
        if answer.devices:
            return Seen(_observed(answer, snapshot), snapshot.notes)
    if mixed:
        notes = (*notes, _ORDER)
    devices = tuple(_observe(i, target, snapshot.driver) for i, target in enumerate(targets))
    return Seen(devices, (*snapshot.notes, *notes))


def _without_nvml(machine: Machine, why: str) -> Seen:
    """What CUDA shows where NVML does not; nothing where no GPU is, as on most machines."""
    if not nvidia_present(machine):
        return Seen()
    why = why or "NVML shows none"
    reasons = [why, without_its_driver(machine)]
    if nvidia_wanted(machine):
        answer = read_cuda(machine)
        if answer.devices:
            return Seen(_observed(_alone(answer), NvmlSnapshot()), (f"{why}: CUDA was asked",))
        reasons.append(answer.error or "CUDA shows none")
    said = "; ".join(filter(None, reasons))
    said = f"an NVIDIA GPU is in this machine but cannot be used: {said}"
    return nothing_shown(DeviceKind.CUDA, said, machine.variable("CUDA_VISIBLE_DEVICES"))


def _alone(answer: CudaAnswer) -> CudaAnswer:
    """The same; a single device needs no identifier, which not every CUDA may take (Jetson's)."""
    if len(answer.devices) > 1:
        return answer
    return replace(answer, devices=tuple(replace(each, uuid="") for each in answer.devices))


_ORDER = (
    "GPUs of several sorts: CUDA may number them otherwise (fastest first); "
    "set CUDA_DEVICE_ORDER=PCI_BUS_ID"
)


def _may_be_numbered_otherwise(machine: Machine, gpus: Sequence[NvmlDevice]) -> bool:
    by_bus = machine.variable("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    return not by_bus and len({gpu.name for gpu in gpus}) > 1


def _observed(answer: CudaAnswer, snapshot: NvmlSnapshot) -> tuple[Observation, ...]:
    """CUDA's devices in its order, each with what NVML knows of the same one."""
    return tuple(
        _observe(i, matching(device, snapshot), snapshot.driver or f"CUDA {answer.version}", device)
        for i, device in enumerate(answer.devices)
    )


def _observe(
    index: int, target: Target, driver: str, cuda: CudaDevice | None = None
) -> Observation:
    """One device, by NVML and, where it was asked, by CUDA."""
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
