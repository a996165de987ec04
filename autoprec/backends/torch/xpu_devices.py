"""Which of torch's Intel GPUs a probe means: by what both know of it, never by its index alone.

torch reports a device's PCI id, and a UUID that holds its address unless the driver derives it from
the chip's own serial number. Older torch reports neither; then the index is all there is.
Source: Intel compute-runtime, shared/source/device/device.cpp (`DeviceUUID`).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autoprec.core.device.placement import XPU_VARIABLE

_INTEL_VENDOR_ID = 0x8086
#: vendor, device, revision, domain, bus, device, function, four bytes of nothing, sub-device
_UUID_LAYOUT = struct.Struct("<HHHHBBB4xB")


@dataclass(frozen=True)
class XpuDevice:
    """What torch reports of an Intel GPU: PCI id ("8086:56a0") and address, "" if unknown."""

    pci: str = ""
    address: str = ""


def identify_device(index: int) -> XpuDevice:
    """Return what torch reports of one of its devices."""
    found = torch.xpu.get_device_properties(index)
    device_id = int(getattr(found, "device_id", 0))
    uuid = bytes(getattr(getattr(found, "uuid", None), "bytes", ()))
    pci = f"{_INTEL_VENDOR_ID:04x}:{device_id:04x}" if device_id else ""
    return XpuDevice(pci, _address(uuid, device_id))


def _address(uuid: bytes, device_id: int) -> str:
    """Decode the PCI address in a UUID, with the tile's number where it is a tile's."""
    if len(uuid) != _UUID_LAYOUT.size:
        return ""
    vendor, device, _, domain, bus, slot, function, part = _UUID_LAYOUT.unpack(uuid)
    if (vendor, device) != (_INTEL_VENDOR_ID, device_id) or not (bus or slot):
        return ""
    address = f"{domain:04x}:{bus:02x}:{slot:02x}.{function}"
    return f"{address}/{part - 1}" if part else address


def find_matching(devices: Sequence[XpuDevice], wanted: str) -> int | None:
    """Find which of torch's devices a placement names; None where it is none of them."""
    number, pci, address = (*wanted.split(), "", "")[:3]
    index = int(number)
    same = [i for i, each in enumerate(devices) if each.pci == pci or not (each.pci and pci)]
    exact = [i for i in same if address and devices[i].address == address]
    if exact:
        return exact[0]
    unplaced = [i for i in same if not (address and devices[i].address)]
    return index if index in unplaced else next(iter(unplaced), None)


def select_assigned_device() -> int | None:
    """Put this process on the GPU it was assigned, and return torch's index of it.

    The current one where none was assigned; None where torch does not list it.
    """
    wanted = os.environ.get(XPU_VARIABLE, "")
    if not wanted:
        return int(torch.xpu.current_device())
    index = find_matching([identify_device(i) for i in range(torch.xpu.device_count())], wanted)
    if index is not None:
        torch.xpu.set_device(index)
    return index
