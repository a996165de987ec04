"""Intel GPUs through the PCI bus, without oneAPI libraries.

ZE_AFFINITY_MASK is read in its plain form ("0,1"); sub-devices ("0.1") count as their device.
Source: oneAPI Level Zero specification, "Environment variables".
"""

from __future__ import annotations

from autoprec.core.device import DeviceKind, Observation
from autoprec.hardware.machine import Machine
from autoprec.hardware.probes import Seen
from autoprec.hardware.probes.pci import nothing_shown, pci_devices, visible

_VENDOR = "8086"
_DISPLAY_CLASSES = ("0300", "0302", "0380")


def probe_intel(machine: Machine) -> Seen:
    """Observe the Intel GPUs that Level Zero would show this process."""
    found = [d for d in pci_devices(machine, _VENDOR) if d.kind[:4] in _DISPLAY_CLASSES]
    if not found:
        return Seen()
    mask = machine.variable("ZE_AFFINITY_MASK")
    roots = None
    if mask is not None:
        roots = ",".join(dict.fromkeys(entry.split(".")[0] for entry in mask.split(",")))
    devices = tuple(
        Observation(
            kind=DeviceKind.XPU,
            index=index,
            vendor="Intel",
            pci=found[ordinal].id,
            memory_bytes=None,
            notes=("its memory is not known without the vendor's library",),
        )
        for index, ordinal in enumerate(visible(len(found), roots))
    )
    if not devices:
        said = f"ZE_AFFINITY_MASK hides all {len(found)} Intel GPUs"
        return nothing_shown(DeviceKind.XPU, said, mask)
    notes: tuple[str, ...] = ()
    if machine.variable("ONEAPI_DEVICE_SELECTOR"):
        notes = (*notes, "ONEAPI_DEVICE_SELECTOR is set and not resolved here")
    return Seen(devices, notes)
