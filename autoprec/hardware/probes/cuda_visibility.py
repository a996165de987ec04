"""Which of NVML's GPUs CUDA shows a process, by CUDA_VISIBLE_DEVICES and MIG.

Sources: CUDA C++ Programming Guide, "CUDA environment variables"; NVIDIA Multi-Instance GPU user
guide, "CUDA device enumeration": since driver 570 one compute instance of each GPU instance, in
addition to whole GPUs; before, a single instance and no whole GPU. That ordinals count whole GPUs
before divided ones, and that a divided GPU's UUID stands for its first instance, is documented
nowhere; datadog-agent's tests (pkg/gpu/cuda) record it for driver 550.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoprec.hardware.probes.cuda_driver import CudaDevice
from autoprec.hardware.probes.nvml import NvmlDevice, NvmlInstance, NvmlSnapshot
from autoprec.hardware.probes.pci import visible_ordinals

#: The first driver whose CUDA shows a process several MIG instances.
_SEVERAL_INSTANCES = 570


@dataclass(frozen=True)
class VisibleDevice:
    """What CUDA shows as one device: a whole GPU, or one MIG instance of it."""

    gpu: NvmlDevice
    instance: NvmlInstance | None = None

    @property
    def uuid(self) -> str:
        """Return the identifier that CUDA_VISIBLE_DEVICES accepts."""
        return self.gpu.uuid if self.instance is None else self.instance.uuid

    @property
    def partition(self) -> str:
        """Return the part of its GPU: "3g.20gb" for NVML's "NVIDIA A100-SXM4-40GB MIG 3g.20gb"."""
        if self.instance is not None:
            return self.instance.name.rpartition("MIG ")[2].strip() or "MIG"
        return "vGPU" if self.gpu.virtual else ""


def visible_devices(
    snapshot: NvmlSnapshot, chosen: str | None
) -> tuple[tuple[VisibleDevice, ...], tuple[str, ...]]:
    """Return the devices that CUDA_VISIBLE_DEVICES shows, in its order, and notes on them."""
    gpus = snapshot.devices
    if all(gpu.mig and not gpu.instances for gpu in gpus):
        return (), ("MIG is enabled but has no instances; create them with nvidia-smi mig -cgi",)
    several = _shows_several_instances(snapshot.driver)
    targets = _enumerable(_chosen(gpus, chosen, several=several), several=several)
    if not targets:
        hidden = f"CUDA_VISIBLE_DEVICES={(chosen or '')[:80]!r} hides all {len(gpus)} NVIDIA GPUs"
        return (), (hidden,)
    alone = targets[0].instance is not None and not several
    if alone and len(_instances(gpus)) + len(gpus) > 2:
        said = "MIG is enabled: CUDA shows one instance, chosen by CUDA_VISIBLE_DEVICES=MIG-..."
        return targets, (said,)
    return targets, ()


def find_in_nvml(device: CudaDevice, snapshot: NvmlSnapshot) -> VisibleDevice:
    """Find the GPU or instance with the UUID of CUDA's device; a nameless one if none has it."""
    targets = [*map(VisibleDevice, snapshot.devices), *_instances(snapshot.devices)]
    same = (each for each in targets if each.uuid.partition("-")[2].lower() == device.uuid)
    return (
        next(same, VisibleDevice(NvmlDevice(""))) if device.uuid else VisibleDevice(NvmlDevice(""))
    )


def _shows_several_instances(driver: str) -> bool:
    major = driver.partition(".")[0]
    return major.isdigit() and int(major) >= _SEVERAL_INSTANCES


def _chosen(
    gpus: Sequence[NvmlDevice], text: str | None, *, several: bool
) -> tuple[VisibleDevice, ...]:
    """Return what the variable names: instances, or GPUs by identifier or ordinal."""
    form = (text or "").strip()[:4]
    if text is not None and form == "MIG-":
        parts = [(name, part) for part in _instances(gpus) for name in _names(part)]
        return _by_prefix(text, "MIG-", parts)
    if text is not None and form == "GPU-":
        found = _by_prefix(text, "GPU-", [(gpu.uuid, VisibleDevice(gpu)) for gpu in gpus])
        return tuple(part for each in found for part in _counted([each.gpu], several=several))
    counted = _counted(gpus, several=several)
    return tuple(counted[i] for i in visible_ordinals(len(counted), text))


def _counted(gpus: Sequence[NvmlDevice], *, several: bool) -> tuple[VisibleDevice, ...]:
    """Return what ordinals count: whole GPUs, then the instances that divided ones may show."""
    whole = (VisibleDevice(gpu) for gpu in gpus if not gpu.mig)
    divided = (_instances([gpu]) for gpu in gpus if gpu.mig)
    parts = (_enumerable(parts, several=several) for parts in divided)
    return (*whole, *(part for each in parts for part in each))


def _enumerable(targets: Sequence[VisibleDevice], *, several: bool) -> tuple[VisibleDevice, ...]:
    """Return what one process is shown of these: one compute instance per GPU instance, or one."""
    if several:
        first: dict[object, VisibleDevice] = {}
        for target in targets:
            first.setdefault(_gpu_instance(target), target)
        return tuple(first.values())
    return tuple(each for each in targets if each.instance)[:1] or tuple(targets)


def _gpu_instance(target: VisibleDevice) -> tuple[str, object]:
    """Return the key of the GPU instance that a target belongs to, or of the GPU."""
    part = target.instance
    if part is None:
        return target.gpu.uuid, None
    return target.gpu.uuid, part.uuid if part.gpu_instance is None else part.gpu_instance


def _instances(gpus: Sequence[NvmlDevice]) -> list[VisibleDevice]:
    return [VisibleDevice(gpu, part) for gpu in gpus for part in gpu.instances]


def _names(target: VisibleDevice) -> tuple[str, ...]:
    """Return an instance's names: MIG-<uuid>; before driver 470, MIG-<GPU uuid>/<gi>/<ci>."""
    part = target.instance
    if part is None:
        return ()
    return part.uuid, f"MIG-{target.gpu.uuid}/{part.gpu_instance}/{part.compute_instance}"


def _by_prefix(
    text: str, prefix: str, named: Sequence[tuple[str, VisibleDevice]]
) -> tuple[VisibleDevice, ...]:
    """Resolve entries by unambiguous prefix.

    The first entry that matches none ends the list; a repeated one empties it.
    """
    kept: list[VisibleDevice] = []
    for entry in (each.strip() for each in text.split(",")):
        exact = [target for name, target in named if name == entry]
        found = exact or [target for name, target in named if name.startswith(entry)]
        if not entry.startswith(prefix) or len(found) != 1:
            break
        if found[0] in kept:
            return ()
        kept.append(found[0])
    return tuple(kept)
