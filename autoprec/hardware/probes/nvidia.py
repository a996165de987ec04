"""NVIDIA GPUs: NVML's devices, in CUDA's order, as CUDA_VISIBLE_DEVICES leaves them.

NVML counts every GPU of the machine in the order of the PCI bus; CUDA counts the visible ones, the
fastest first unless CUDA_DEVICE_ORDER=PCI_BUS_ID.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoprec.core.device import DeviceKind, Observation
from autoprec.hardware.machine import Machine
from autoprec.hardware.probes import Seen
from autoprec.hardware.probes.cuda_visibility import Target, shown
from autoprec.hardware.probes.memory import read_limits
from autoprec.hardware.probes.nvidia_signs import nvidia_present, without_its_driver
from autoprec.hardware.probes.nvml import NvmlDevice, NvmlSnapshot, read_nvml
from autoprec.hardware.probes.pci import nothing_shown


def probe_nvidia(machine: Machine) -> Seen:
    """Observe the NVIDIA GPUs that CUDA would show this process."""
    try:
        module = machine.nvml()
    except ImportError as error:
        return _driverless(machine, f"pynvml cannot be imported: {error}")
    snapshot = read_nvml(module)
    if not snapshot.devices:
        return _driverless(machine, "; ".join(snapshot.notes))
    chosen = machine.variable("CUDA_VISIBLE_DEVICES")
    targets, notes = shown(snapshot, chosen)
    if not targets:
        return nothing_shown(DeviceKind.CUDA, "; ".join((*snapshot.notes, *notes)), chosen)
    notes = (*snapshot.notes, *notes, *_order_notes(machine, snapshot.devices))
    devices = tuple(
        _observe(machine, index, target, snapshot) for index, target in enumerate(targets)
    )
    return Seen(devices, notes)


def _driverless(machine: Machine, why: str) -> Seen:
    """Say why there is no GPU only where there is one: most machines have none to miss."""
    if not nvidia_present(machine):
        return Seen()
    reasons = (why or "NVML shows none", without_its_driver(machine))
    said = "; ".join(filter(None, reasons))
    text = f"an NVIDIA GPU is in this machine but cannot be used: {said}"
    return nothing_shown(DeviceKind.CUDA, text, machine.variable("CUDA_VISIBLE_DEVICES"))


def _order_notes(machine: Machine, gpus: Sequence[NvmlDevice]) -> tuple[str, ...]:
    by_bus = machine.variable("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if by_bus or len({gpu.name for gpu in gpus}) < 2:
        return ()
    return (
        "GPUs of several sorts: CUDA may number them otherwise (fastest first); "
        "set CUDA_DEVICE_ORDER=PCI_BUS_ID",
    )


def _observe(machine: Machine, index: int, target: Target, snapshot: NvmlSnapshot) -> Observation:
    gpu, part = target.gpu, target.instance
    memory = part.memory_bytes if part else gpu.memory_bytes
    notes: tuple[str, ...] = ()
    if memory is None:
        memory = read_limits(machine).memory_bytes
        notes = ("NVML does not tell its memory; taken as shared with the CPU",)
    return Observation(
        kind=DeviceKind.CUDA,
        index=index,
        name=gpu.name,
        vendor="NVIDIA",
        compute_capability=gpu.compute_capability,
        memory_bytes=memory,
        uuid=target.uuid,
        driver=snapshot.driver,
        partition=target.partition,
        notes=notes,
    )
