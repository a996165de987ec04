"""TPUs through the PCI bus: asking a TPU library can wait for a metadata server for ever."""

from __future__ import annotations

from autoprec.core.device.facts import DeviceKind, Observation
from autoprec.hardware.machine import Machine
from autoprec.hardware.probes import Seen
from autoprec.hardware.probes.pci import PciDevice, nothing_shown, pci_devices, visible

_VENDOR = "1ae0"
#: Google's disks (PCI base class 01) and network cards (02) share its vendor id.
_NO_CHIP = ("01", "02")


def probe_tpu(machine: Machine) -> Seen:
    """Observe the TPU chips on the bus."""
    chips = [device for device in pci_devices(machine, _VENDOR) if _is_chip(device)]
    chosen = machine.variable("TPU_VISIBLE_CHIPS")
    shown = visible(len(chips), chosen)
    if chips and not shown:
        said = f"TPU_VISIBLE_CHIPS hides all {len(chips)} TPU chips"
        return nothing_shown(DeviceKind.TPU, said, chosen)
    return Seen(tuple(_observe(i, ordinal, chips[ordinal]) for i, ordinal in enumerate(shown)))


def _is_chip(device: PciDevice) -> bool:
    return not device.kind.startswith(_NO_CHIP)


def _observe(index: int, ordinal: int, chip: PciDevice) -> Observation:
    return Observation(
        kind=DeviceKind.TPU,
        index=index,
        vendor="Google",
        pci=chip.id,
        pci_subsystem=chip.subsystem,
        uuid=str(ordinal),
    )
