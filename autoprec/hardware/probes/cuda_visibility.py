"""Which of NVML's GPUs CUDA shows a process: CUDA_VISIBLE_DEVICES, and how MIG divides them.

Sources: CUDA C++ Programming Guide, "CUDA environment variables"; NVIDIA Multi-Instance GPU user
guide, "CUDA device enumeration": from driver 570 on one compute instance of each GPU instance,
beside whole GPUs; before, one alone and no whole GPU beside it. That ordinals count whole GPUs
before divided ones, and that a divided one's UUID stands for its first instance, is documented
nowhere; datadog-agent's tests (pkg/gpu/cuda) record it of driver 550.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoprec.hardware.probes.cuda import CudaDevice
from autoprec.hardware.probes.nvml import NvmlDevice, NvmlInstance, NvmlSnapshot
from autoprec.hardware.probes.pci import visible

#: The first driver whose CUDA shows a process several MIG instances.
_SEVERAL_INSTANCES = 570


@dataclass(frozen=True)
class Target:
    """What CUDA shows as one device: a whole GPU, or one MIG instance of it."""

    gpu: NvmlDevice
    instance: NvmlInstance | None = None

    @property
    def uuid(self) -> str:
        """The identifier that CUDA_VISIBLE_DEVICES takes."""
        return self.gpu.uuid if self.instance is None else self.instance.uuid

    @property
    def partition(self) -> str:
        """The part of its GPU: "3g.20gb" of NVML's "NVIDIA A100-SXM4-40GB MIG 3g.20gb"."""
        if self.instance is not None:
            return self.instance.name.rpartition("MIG ")[2].strip() or "MIG"
        return "vGPU" if self.gpu.virtual else ""


def shown(snapshot: NvmlSnapshot, chosen: str | None) -> tuple[tuple[Target, ...], tuple[str, ...]]:
    """What CUDA_VISIBLE_DEVICES leaves, in its order, and what there is to say about it."""
    gpus = snapshot.devices
    if all(gpu.mig and not gpu.instances for gpu in gpus):
        return (), ("MIG is on but no instance is created: nvidia-smi mig -cgi",)
    several = _shows_several(snapshot.driver)
    targets = _enumerable(_chosen(gpus, chosen, several=several), several=several)
    if not targets:
        hidden = f"CUDA_VISIBLE_DEVICES={(chosen or '')[:80]!r} hides all {len(gpus)} NVIDIA GPUs"
        return (), (hidden,)
    alone = targets[0].instance is not None and not several
    if alone and len(_instances(gpus)) + len(gpus) > 2:
        said = "MIG is on: CUDA shows one instance; choose another by CUDA_VISIBLE_DEVICES=MIG-..."
        return targets, (said,)
    return targets, ()


def matching(device: CudaDevice, snapshot: NvmlSnapshot) -> Target:
    """What NVML knows of a device that CUDA shows, by its identifier; nothing where it is not."""
    targets = [*map(Target, snapshot.devices), *_instances(snapshot.devices)]
    same = (each for each in targets if each.uuid.partition("-")[2].lower() == device.uuid)
    return next(same, Target(NvmlDevice(""))) if device.uuid else Target(NvmlDevice(""))


def _shows_several(driver: str) -> bool:
    major = driver.partition(".")[0]
    return major.isdigit() and int(major) >= _SEVERAL_INSTANCES


def _chosen(gpus: Sequence[NvmlDevice], text: str | None, *, several: bool) -> tuple[Target, ...]:
    """What the variable names: instances, or GPUs by identifier or ordinal."""
    form = (text or "").strip()[:4]
    if text is not None and form == "MIG-":
        parts = [(name, part) for part in _instances(gpus) for name in _names(part)]
        return _by_prefix(text, "MIG-", parts)
    if text is not None and form == "GPU-":
        found = _by_prefix(text, "GPU-", [(gpu.uuid, Target(gpu)) for gpu in gpus])
        return tuple(part for each in found for part in _counted([each.gpu], several=several))
    counted = _counted(gpus, several=several)
    return tuple(counted[i] for i in visible(len(counted), text))


def _counted(gpus: Sequence[NvmlDevice], *, several: bool) -> tuple[Target, ...]:
    """What ordinals count: whole GPUs, then of divided ones the instances that may be shown."""
    whole = (Target(gpu) for gpu in gpus if not gpu.mig)
    divided = (_instances([gpu]) for gpu in gpus if gpu.mig)
    parts = (_enumerable(parts, several=several) for parts in divided)
    return (*whole, *(part for each in parts for part in each))


def _enumerable(targets: Sequence[Target], *, several: bool) -> tuple[Target, ...]:
    """Of these what one process is shown: one compute instance a GPU instance, or one in all."""
    if several:
        first: dict[object, Target] = {}
        for target in targets:
            first.setdefault(_place(target), target)
        return tuple(first.values())
    return tuple(each for each in targets if each.instance)[:1] or tuple(targets)


def _place(target: Target) -> tuple[str, object]:
    """The GPU instance that a target is in, else the GPU."""
    part = target.instance
    if part is None:
        return target.gpu.uuid, None
    return target.gpu.uuid, part.uuid if part.gpu_instance is None else part.gpu_instance


def _instances(gpus: Sequence[NvmlDevice]) -> list[Target]:
    return [Target(gpu, part) for gpu in gpus for part in gpu.instances]


def _names(target: Target) -> tuple[str, ...]:
    """An instance's names: MIG-<uuid>, and before driver 470 MIG-<GPU uuid>/<gi>/<ci>."""
    part = target.instance
    if part is None:
        return ()
    return part.uuid, f"MIG-{target.gpu.uuid}/{part.gpu_instance}/{part.compute_instance}"


def _by_prefix(text: str, prefix: str, named: Sequence[tuple[str, Target]]) -> tuple[Target, ...]:
    """Entries by unambiguous prefix; the first that fits none ends the list, a repeated one all."""
    kept: list[Target] = []
    for entry in (each.strip() for each in text.split(",")):
        exact = [target for name, target in named if name == entry]
        found = exact or [target for name, target in named if name.startswith(entry)]
        if not entry.startswith(prefix) or len(found) != 1:
            break
        if found[0] in kept:
            return ()
        kept.append(found[0])
    return tuple(kept)
