"""NVIDIA GPUs: NVML's devices, in CUDA's order, as CUDA_VISIBLE_DEVICES leaves them.

NVML counts every GPU of the machine in the order of the PCI bus; CUDA counts the visible ones, the
fastest first unless CUDA_DEVICE_ORDER=PCI_BUS_ID. Source: CUDA C++ Programming Guide, "CUDA
environment variables"; NVIDIA Multi-Instance GPU user guide, "CUDA device enumeration".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoprec.core.device import DeviceKind, Observation
from autoprec.hardware.machine import Machine
from autoprec.hardware.probes import Seen
from autoprec.hardware.probes.memory import read_limits
from autoprec.hardware.probes.nvidia_signs import nvidia_present, without_its_driver
from autoprec.hardware.probes.nvml import NvmlDevice, NvmlInstance, NvmlSnapshot, read_nvml
from autoprec.hardware.probes.pci import nothing_shown, visible


@dataclass(frozen=True)
class _Target:
    """What CUDA shows as one device: a whole GPU, or one MIG instance of it."""

    gpu: NvmlDevice
    instance: NvmlInstance | None = None


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
    targets, notes = _visible(snapshot.devices, chosen)
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


def _visible(
    gpus: Sequence[NvmlDevice], chosen: str | None
) -> tuple[tuple[_Target, ...], tuple[str, ...]]:
    """What CUDA_VISIBLE_DEVICES leaves, in its order, and what there is to say about it."""
    if chosen is None:
        return _enumerated(gpus, tuple(range(len(gpus))))
    text = chosen.strip()
    if text.startswith("MIG-"):
        targets = _by_prefix(text, "MIG-", [(name, t) for t in _parts(gpus) for name in _names(t)])
    elif text.startswith("GPU-"):
        targets = _by_prefix(text, "GPU-", [(gpu.uuid, _Target(gpu)) for gpu in gpus])
    else:
        targets, notes = _enumerated(gpus, visible(len(gpus), text))
        return targets, (*notes, *_hidden(len(targets), len(gpus), chosen))
    return targets, _hidden(len(targets), len(gpus), chosen)


def _hidden(shown: int, count: int, chosen: str) -> tuple[str, ...]:
    if shown:
        return ()
    return (f"CUDA_VISIBLE_DEVICES={chosen[:80]!r} hides all {count} NVIDIA GPUs",)


def _enumerated(
    gpus: Sequence[NvmlDevice], ordinals: tuple[int, ...]
) -> tuple[tuple[_Target, ...], tuple[str, ...]]:
    """Whole GPUs by ordinal; of GPUs split by MIG, CUDA shows a process one instance alone."""
    split = [gpus[i] for i in ordinals if gpus[i].mig]
    if not split:
        return tuple(_Target(gpus[i]) for i in ordinals), ()
    part = next((_Target(gpu, gpu.instances[0]) for gpu in split if gpu.instances), None)
    note = "MIG is on: CUDA shows one instance; choose another by CUDA_VISIBLE_DEVICES=MIG-..."
    if part is None:
        return (), ("MIG is on but no instance is created: nvidia-smi mig -cgi",)
    return (part,), (note,)


def _parts(gpus: Sequence[NvmlDevice]) -> list[_Target]:
    return [_Target(gpu, part) for gpu in gpus for part in gpu.instances]


def _names(target: _Target) -> tuple[str, ...]:
    """An instance's names: MIG-<uuid>, and before driver 470 MIG-<GPU uuid>/<gi>/<ci>."""
    part = target.instance
    if part is None:
        return ()
    return part.uuid, f"MIG-{target.gpu.uuid}/{part.gpu_instance}/{part.compute_instance}"


def _by_prefix(text: str, prefix: str, named: Sequence[tuple[str, _Target]]) -> tuple[_Target, ...]:
    """Entries by unambiguous prefix; the first that fits none ends the list, a repeated one all."""
    kept: list[_Target] = []
    for entry in (each.strip() for each in text.split(",")):
        exact = [target for name, target in named if name == entry]
        found = exact or [target for name, target in named if name.startswith(entry)]
        if not entry.startswith(prefix) or len(found) != 1:
            break
        if found[0] in kept:
            return ()
        kept.append(found[0])
    return tuple(kept)


def _order_notes(machine: Machine, gpus: Sequence[NvmlDevice]) -> tuple[str, ...]:
    by_bus = machine.variable("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    if by_bus or len({gpu.name for gpu in gpus}) < 2:
        return ()
    return (
        "GPUs of several sorts: CUDA may number them otherwise (fastest first); "
        "set CUDA_DEVICE_ORDER=PCI_BUS_ID",
    )


def _observe(machine: Machine, index: int, target: _Target, snapshot: NvmlSnapshot) -> Observation:
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
        uuid=part.uuid if part else gpu.uuid,
        driver=snapshot.driver,
        partition=(part.name or "MIG") if part else "",
        notes=notes,
    )
