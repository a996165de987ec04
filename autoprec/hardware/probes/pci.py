"""PCI devices and visibility lists, shared by several probes; and what is seen on the bus alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.core.device.probe_result import Unusable
from autoprec.hardware.catalogue import load_other_accelerators
from autoprec.hardware.machine import Machine
from autoprec.hardware.probes import Findings

FOLDER = "/sys/bus/pci/devices"

#: VGA, 3D and other display controllers, and processing accelerators.
_GPU_CLASSES = ("0300", "0302", "0380", "1200")
#: Drivers that hold a device for a virtual machine.
_PASSTHROUGH_DRIVERS = ("vfio-pci", "pci-stub", "xen-pciback")


@dataclass(frozen=True)
class PciDevice:
    """A device on the bus; ids are four lower-case hexadecimal digits, `kind` the class code.

    `driver` is the kernel module that holds it; "" if none does or it cannot be read.
    """

    address: str
    vendor: str
    device: str
    subsystem: str
    kind: str
    driver: str = ""

    @property
    def id(self) -> str:
        """Return vendor and device as the catalogue writes them: "1ae0:005e"."""
        return f"{self.vendor}:{self.device}"


def pci_devices(machine: Machine, vendor: str) -> Iterator[PciDevice]:
    """Yield the devices of one vendor, in the order of the bus."""
    for address in machine.entries(FOLDER):
        if _id(machine, address, "vendor") == vendor:
            yield PciDevice(
                address,
                vendor,
                _id(machine, address, "device"),
                _id(machine, address, "subsystem_device"),
                _id(machine, address, "class"),
                _driver(machine, address),
            )


def gpus_on_the_bus(machine: Machine, vendor: str) -> tuple[PciDevice, ...]:
    """Return the GPUs of one vendor on the bus, except those assigned to virtual machines."""
    return tuple(
        device
        for device in pci_devices(machine, vendor)
        if device.kind[:4] in _GPU_CLASSES and device.driver not in _PASSTHROUGH_DRIVERS
    )


def _driver(machine: Machine, address: str) -> str:
    for line in (machine.read(f"{FOLDER}/{address}/uevent") or "").splitlines():
        if line.startswith("DRIVER="):
            return line.removeprefix("DRIVER=").strip()
    return ""


def _id(machine: Machine, address: str, name: str) -> str:
    text = (machine.read(f"{FOLDER}/{address}/{name}") or "").strip().lower()
    return text.removeprefix("0x")


def visible_ordinals(count: int, text: str | None) -> tuple[int, ...]:
    """Return the ordinals that a list such as "0,2" leaves visible; all of them without a list.

    As in CUDA, reading stops at the first entry that is not a valid ordinal, and a repeated one
    leaves nothing visible.
    """
    if text is None:
        return tuple(range(count))
    kept: list[int] = []
    for entry in text.split(","):
        ordinal = _leading_integer(entry.strip())
        if ordinal in kept:
            return ()
        if not 0 <= ordinal < count:
            break
        kept.append(ordinal)
    return tuple(kept)


def names_a_device(text: str | None) -> bool:
    """Return whether a visibility list names a device; "", "-1" and "none" hide all of them."""
    if text is None:
        return True
    first = text.split(",")[0].strip().upper()
    return first[:1].isdigit() or first.startswith(("+", "GPU-", "MIG-"))


def no_visible_device(kind: DeviceKind, said: str, *lists: str | None) -> Findings:
    """Report that visibility lists leave no device: hidden on purpose, or unusable by mistake."""
    if all(names_a_device(text) for text in lists):
        return Findings(unusable=(Unusable(kind, said),))
    return Findings(notes=(said,))


def _leading_integer(text: str) -> int:
    """Return the integer that a text starts with (as C's strtoul reads "1gpu"), else -1."""
    digits = ""
    for character in text.removeprefix("+"):
        if not (character.isascii() and character.isdigit()):
            break
        digits += character
    return int(digits) if digits else -1


# Seen on the bus alone --------------------------------------------------------------------------


def probe_other_accelerators(machine: Machine) -> Findings:
    """Note the accelerators on the bus that have a software stack of their own."""
    known = {pci: each for each in load_other_accelerators() for pci in each.pci}
    vendors = {pci.partition(":")[0] for pci in known}
    ids = [device.id for vendor in sorted(vendors) for device in pci_devices(machine, vendor)]
    counts = Counter(known[pci] for pci in ids if pci in known)
    return Findings(
        notes=tuple(
            f"{count} x {each.title} in this machine, which autoprec does not tune: {each.advice}"
            for each, count in counts.items()
        )
    )


_GOOGLE = "1ae0"
#: PCI base classes of Google's disks (01) and network cards (02), which share its vendor id.
_OTHER_CLASSES = ("01", "02")


def probe_tpu(machine: Machine) -> Findings:
    """Observe the TPU chips on the bus: a TPU library can wait for a metadata server forever."""
    of_google = pci_devices(machine, _GOOGLE)
    chips = [each for each in of_google if not each.kind.startswith(_OTHER_CLASSES)]
    chosen = machine.variable("TPU_VISIBLE_CHIPS")
    shown = visible_ordinals(len(chips), chosen)
    if chips and not shown:
        said = f"TPU_VISIBLE_CHIPS hides all {len(chips)} TPU chips"
        return no_visible_device(DeviceKind.TPU, said, chosen)
    return Findings(
        tuple(
            Observation(
                kind=DeviceKind.TPU,
                index=index,
                vendor="Google",
                pci=chips[ordinal].id,
                pci_subsystem=chips[ordinal].subsystem,
                uuid=str(ordinal),
            )
            for index, ordinal in enumerate(shown)
        )
    )
