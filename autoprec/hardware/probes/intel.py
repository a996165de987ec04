"""Intel GPUs through the PCI bus, without oneAPI libraries, as PyTorch lists them.

If there is a discrete GPU, PyTorch lists only discrete ones; each tile is a device of its own
unless ZE_FLAT_DEVICE_HIERARCHY is COMPOSITE. The order in which the driver counts cannot be seen
from here: a GPU is known by its address, and the worker finds it among those PyTorch reports.
ZE_AFFINITY_MASK is read in its plain form ("0,1"); sub-devices ("0.1") count as their device.

Sources: torch/xpu/__init__.py (`_enum_zes_device_infos`); oneAPI Level Zero specification,
"Environment variables"; Intel Core processor datasheets (processor graphics is device 2, function 0
of bus 0); Linux kernel, drm/xe/xe_gt_freq.c ("tile0") and drm/i915/gt/sysfs_gt.c ("gt0").
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.hardware.machine import Machine
from autoprec.hardware.probes import Findings
from autoprec.hardware.probes.pci import (
    FOLDER,
    PciDevice,
    gpus_on_the_bus,
    no_visible_device,
    visible_ordinals,
)

_VENDOR = "8086"
_DISPLAY_CLASSES = ("0300", "0302", "0380")
_INTEGRATED = "0000:00:02.0"


def probe_intel(machine: Machine) -> Findings:
    """Observe the Intel GPUs that PyTorch would list in this process."""
    gpus = [gpu for gpu in gpus_on_the_bus(machine, _VENDOR) if gpu.kind[:4] in _DISPLAY_CLASSES]
    parts = [part for gpu in gpus for part in _parts(machine, gpu)]
    if not parts:
        return Findings()
    mask = machine.variable("ZE_AFFINITY_MASK")
    shown = [parts[i] for i in visible_ordinals(len(parts), _roots(mask))]
    if not shown:
        said = f"ZE_AFFINITY_MASK hides all {len(parts)} Intel GPUs"
        return no_visible_device(DeviceKind.XPU, said, mask)
    listed = [part for part in shown if part.uuid != _INTEGRATED] or shown
    notes: tuple[str, ...] = ()
    if len(listed) < len(shown):
        said = "the Intel GPU integrated in the CPU is left out: PyTorch lists only discrete ones"
        notes = (*notes, said)
    if machine.variable("ONEAPI_DEVICE_SELECTOR"):
        notes = (*notes, "ONEAPI_DEVICE_SELECTOR is set, but autoprec does not evaluate it")
    return Findings(tuple(replace(part, index=i) for i, part in enumerate(listed)), notes)


def _roots(mask: str | None) -> str | None:
    """Return the mask without its sub-devices."""
    if mask is None:
        return None
    return ",".join(dict.fromkeys(entry.split(".")[0] for entry in mask.split(",")))


def _parts(machine: Machine, gpu: PciDevice) -> Iterator[Observation]:
    """Observe a GPU as one device, or each of its tiles as one."""
    tiles = _tiles(machine, gpu)
    for number in range(tiles):
        yield Observation(
            kind=DeviceKind.XPU,
            vendor="Intel",
            pci=gpu.id,
            memory_bytes=None,
            uuid=gpu.address if tiles == 1 else f"{gpu.address}/{number}",
            partition="" if tiles == 1 else f"one of {tiles} tiles",
            notes=("its memory size is unknown without the vendor's library",),
        )


def _tiles(machine: Machine, gpu: PciDevice) -> int:
    """Count the devices that PyTorch makes of a GPU."""
    if machine.variable("ZE_FLAT_DEVICE_HIERARCHY") == "COMPOSITE" or gpu.address == _INTEGRATED:
        return 1
    folder = f"{FOLDER}/{gpu.address}"
    tiles = _matching(machine, folder, r"tile\d+")
    cards = _matching(machine, f"{folder}/drm", r"card\d+")
    halves = [
        gt for card in cards for gt in _matching(machine, f"{folder}/drm/{card}/gt", r"gt\d+")
    ]
    return len(tiles) or len(halves) or 1


def _matching(machine: Machine, folder: str, pattern: str) -> list[str]:
    return [name for name in machine.entries(folder) if re.fullmatch(pattern, name)]
