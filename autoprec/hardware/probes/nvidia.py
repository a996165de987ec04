"""NVIDIA GPUs: those CUDA shows this process, in its order, with what NVML knows of them.

NVML counts every GPU of the machine in the order of the PCI bus; CUDA counts the visible ones, the
fastest first unless CUDA_DEVICE_ORDER=PCI_BUS_ID, and of a divided GPU (MIG) some instances, by
rules that its driver alone knows. If NVML is missing or does not tell, CUDA itself is asked,
which takes longer: the compute capability is `nvml`'s or `cuda_child`'s. Whether a GPU is present
at all is seen without any driver library.

Sources of the latter: NVIDIA driver README, "The /proc file system interface" and "Device files"
(nvidia0); Jetson Linux developer guide (nvhost and nvgpu device files, nvmap); Microsoft, "GPU
accelerated machine learning in WSL" (/dev/dxg, and libcuda in /usr/lib/wsl/lib).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoprec.core.codec import DecodeError, from_plain
from autoprec.core.device.observation import UNIFIED_MEMORY_NOTE, DeviceKind, Observation
from autoprec.hardware.machine import Machine
from autoprec.hardware.probes import Findings
from autoprec.hardware.probes.nvml import NvmlDevice, NvmlInstance, NvmlSnapshot, read_nvml
from autoprec.hardware.probes.pci import (
    gpus_on_the_bus,
    names_a_device,
    no_visible_device,
    visible_ordinals,
)

_MIG = " MIG "


@dataclass(frozen=True)
class CudaDevice:
    """One device in CUDA's order.

    `uuid` is without NVML's prefix; an `integrated` device has no memory of its own.
    """

    name: str = ""
    compute_capability: str = ""
    integrated: bool = False
    uuid: str = ""
    memory_bytes: int | None = None

    @property
    def model(self) -> str:
        """Return the GPU's name, such as "NVIDIA A100-SXM4-40GB", for an instance of it too."""
        return self.name.partition(_MIG)[0]

    @property
    def partition(self) -> str:
        """Return the part of its GPU, such as "3g.20gb"; "" for a whole one."""
        return self.name.partition(_MIG)[2]

    @property
    def identifier(self) -> str:
        """Return the identifier that CUDA_VISIBLE_DEVICES accepts."""
        prefix = "MIG-" if self.partition else "GPU-"
        return f"{prefix}{self.uuid}" if self.uuid else ""


@dataclass(frozen=True)
class CudaAnswer:
    """The driver's answer; `version` is CUDA's own, `error` says why there are no devices."""

    version: str = ""
    devices: tuple[CudaDevice, ...] = ()
    error: str = ""


def read_cuda(machine: Machine) -> CudaAnswer:
    """Ask CUDA's driver in a child process; takes about a second, more on large nodes."""
    try:
        return from_plain(CudaAnswer, machine.cuda())
    except DecodeError as error:
        return CudaAnswer(error=f"CUDA's driver gave an answer that could not be parsed: {error}")


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
    gpus, notes = snapshot.devices, snapshot.notes
    if not gpus:
        return _without_nvml(machine, "; ".join(notes))
    chosen = machine.variable("CUDA_VISIBLE_DEVICES")
    by_bus = machine.variable("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    ambiguous = not by_bus and len({gpu.name for gpu in gpus}) > 1
    divided = any(gpu.mig for gpu in gpus)
    in_doubt = divided or ambiguous or not all(gpu.compute_capability for gpu in gpus)
    if in_doubt and names_a_device(chosen):
        answer = read_cuda(machine)
        if answer.devices:
            return Findings(_observed(answer, snapshot), notes)
        if divided:
            said = f"MIG is enabled, and CUDA shows none: {answer.error}"
            if not any(gpu.instances for gpu in gpus):
                said = "MIG is enabled but has no instances; create them with nvidia-smi mig -cgi"
            return no_visible_device(DeviceKind.CUDA, "; ".join((*notes, said)), chosen)
    visible = _visible(gpus, chosen)
    if not visible:
        said = f"CUDA_VISIBLE_DEVICES={(chosen or '')[:80]!r} hides all {len(gpus)} NVIDIA GPUs"
        return no_visible_device(DeviceKind.CUDA, "; ".join((*notes, said)), chosen)
    devices = tuple(
        _observe(i, gpu, None, snapshot.driver, CudaDevice()) for i, gpu in enumerate(visible)
    )
    return Findings(devices, (*notes, _ORDER_NOTE) if ambiguous else notes)


def _visible(gpus: Sequence[NvmlDevice], chosen: str | None) -> list[NvmlDevice]:
    """Return the undivided GPUs that CUDA_VISIBLE_DEVICES shows, in its order.

    Source: CUDA C++ Programming Guide, "CUDA environment variables". It lists ordinals, or
    unambiguous beginnings of identifiers: the first entry that is none ends the list, a repeated
    one empties it.
    """
    if chosen is None or not chosen.strip().startswith("GPU-"):
        return [gpus[i] for i in visible_ordinals(len(gpus), chosen)]
    kept: list[NvmlDevice] = []
    for entry in map(str.strip, chosen.split(",")):
        exact = [gpu for gpu in gpus if gpu.uuid == entry]
        named = exact or [gpu for gpu in gpus if gpu.uuid.startswith(entry)]
        if not entry.startswith("GPU-") or len(named) != 1:
            break
        if named[0] in kept:
            return []
        kept.append(named[0])
    return kept


def _without_nvml(machine: Machine, why: str) -> Findings:
    """Ask CUDA if NVML shows nothing; find nothing if there is no GPU, as on most machines."""
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


def _observed(answer: CudaAnswer, snapshot: NvmlSnapshot) -> tuple[Observation, ...]:
    """Combine CUDA's devices, in its order, with what NVML knows about each."""
    driver = snapshot.driver or f"CUDA {answer.version}"
    seen = []
    for index, device in enumerate(answer.devices):
        known: dict[str, tuple[NvmlDevice, NvmlInstance | None]] = {}
        for gpu in snapshot.devices:
            known |= {part.uuid: (gpu, part) for part in gpu.instances} | {gpu.uuid: (gpu, None)}
        same = (
            both for uuid, both in known.items() if uuid.partition("-")[2].lower() == device.uuid
        )
        gpu, part = next(same, (NvmlDevice(""), None)) if device.uuid else (NvmlDevice(""), None)
        seen.append(_observe(index, gpu, part, driver, device))
    return tuple(seen)


def _observe(
    index: int, gpu: NvmlDevice, part: NvmlInstance | None, driver: str, cuda: CudaDevice
) -> Observation:
    """Observe a GPU or a MIG instance of one, by NVML and what CUDA says, if it was asked."""
    memory = (part.memory_bytes if part else gpu.memory_bytes) or cuda.memory_bytes
    unified = cuda.integrated or memory is None
    partition = "vGPU" if gpu.virtual else cuda.partition
    if part is not None:  # "3g.20gb" of NVML's "NVIDIA A100-SXM4-40GB MIG 3g.20gb"
        partition = part.name.rpartition("MIG ")[2].strip() or "MIG"
    return Observation(
        kind=DeviceKind.CUDA,
        index=index,
        name=gpu.name or cuda.model,
        vendor="NVIDIA",
        compute_capability=gpu.compute_capability or cuda.compute_capability,
        memory_bytes=None if unified else memory,
        uuid=(part or gpu).uuid or cuda.identifier,
        driver=driver,
        partition=partition,
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
