"""Places child processes on devices: they are shown no other, under the names frameworks use.

An ordinal such as "cuda:1" can mean another device in another process, because visibility variables
renumber and CUDA puts the fastest first. So whatever a child does on a device, a trial or a timed
product, it is shown that device only and uses the first of its kind. Ranks that train together are
all shown the same devices, in the same order, and each uses the one of its own number: libraries
that exchange gradients look for the peers' devices, too. oneAPI has no variable that takes an
identifier: of several Intel GPUs a child is told which one to look for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autoprec.core.device.observation import DeviceKind, Observation

#: "-1" hides all, as in CUDA and HIP; on Windows an empty variable is none at all.
_HIDE_ALL_GPUS = {"CUDA_VISIBLE_DEVICES": "-1", "HIP_VISIBLE_DEVICES": "-1"}

#: Tells a child which Intel GPU it is on: its number, its PCI id and its address, by the probe.
XPU_VARIABLE = "AUTOPREC_XPU"


@dataclass(frozen=True)
class Placement:
    """What a child process calls its device, and the variables that show it no other."""

    device: str
    environment: Mapping[str, str] = field(default_factory=dict)


def expose_only(observation: Observation) -> Placement:
    """Return the placement that shows a child this device only."""
    return expose([observation])


def expose(devices: Sequence[Observation]) -> Placement:
    """Return the placement that shows children these devices only, all of one kind, in this order.

    Of several, `device` names the first; with an index, as in "cuda:1", any of them.
    """
    kind = devices[0].kind
    name = kind.framework_name
    if kind is DeviceKind.CPU:
        return Placement(name, _HIDE_ALL_GPUS)
    if kind is DeviceKind.CUDA:
        known = all(each.uuid for each in devices)
        uuids = ",".join(each.uuid for each in devices)
        return Placement(name, {"CUDA_VISIBLE_DEVICES": uuids} if known else {})
    if kind is DeviceKind.ROCM:
        numbers = ",".join(each.uuid or str(each.index) for each in devices)
        return Placement(name, {"HIP_VISIBLE_DEVICES": numbers})
    if kind is DeviceKind.XPU:
        (only,) = devices
        return Placement(name, {XPU_VARIABLE: f"{only.index} {only.pci} {only.uuid}".strip()})
    return Placement(name)
