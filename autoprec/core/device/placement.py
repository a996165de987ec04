"""Places a child process on one device: it is shown no other, under the name frameworks use.

An ordinal such as "cuda:1" can mean another device in another process, because visibility variables
renumber and CUDA puts the fastest first. So whatever a child does on a device, a trial or a timed
product, it is shown that device only and uses the first of its kind. oneAPI has no variable that
takes an identifier: of several Intel GPUs a child is told which one to look for.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    name = observation.kind.framework_name
    if observation.kind is DeviceKind.CPU:
        return Placement(name, _HIDE_ALL_GPUS)
    if observation.kind is DeviceKind.CUDA:
        return Placement(
            name, {"CUDA_VISIBLE_DEVICES": observation.uuid} if observation.uuid else {}
        )
    if observation.kind is DeviceKind.ROCM:
        return Placement(name, {"HIP_VISIBLE_DEVICES": observation.uuid or str(observation.index)})
    if observation.kind is DeviceKind.XPU:
        return Placement(
            name,
            {XPU_VARIABLE: f"{observation.index} {observation.pci} {observation.uuid}".strip()},
        )
    return Placement(name)
