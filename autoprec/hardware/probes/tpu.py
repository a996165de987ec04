"""TPUs through the PCI bus: a TPU library can wait for a metadata server forever."""

from __future__ import annotations

from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.hardware.machine import Machine
from autoprec.hardware.probes import Findings
from autoprec.hardware.probes.pci import PciDevice, no_visible_device, pci_devices, visible_ordinals

_VENDOR = "1ae0"
#: PCI base classes of Google's disks (01) and network cards (02), which share its vendor id.
_OTHER_CLASSES = ("01", "02")


def probe_tpu(machine: Machine) -> Findings:
    """Observe the TPU chips on the bus."""
    chips = [device for device in pci_devices(machine, _VENDOR) if _is_chip(device)]
    chosen = machine.variable("TPU_VISIBLE_CHIPS")
    shown = visible_ordinals(len(chips), chosen)
    if chips and not shown:
        said = f"TPU_VISIBLE_CHIPS hides all {len(chips)} TPU chips"
        return no_visible_device(DeviceKind.TPU, said, chosen)
    return Findings(tuple(_observe(i, ordinal, chips[ordinal]) for i, ordinal in enumerate(shown)))


def _is_chip(device: PciDevice) -> bool:
    return not device.kind.startswith(_OTHER_CLASSES)


def _observe(index: int, ordinal: int, chip: PciDevice) -> Observation:
    return Observation(
        kind=DeviceKind.TPU,
        index=index,
        vendor="Google",
        pci=chip.id,
        pci_subsystem=chip.subsystem,
        uuid=str(ordinal),
    )
