"""PCI devices and visibility lists, which several probes share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from autoprec.hardware.machine import Machine

_FOLDER = "/sys/bus/pci/devices"


@dataclass(frozen=True)
class PciDevice:
    """A device on the bus; ids are four lower-case hexadecimal digits, `kind` the class code."""

    address: str
    vendor: str
    device: str
    subsystem: str
    kind: str

    @property
    def id(self) -> str:
        """Vendor and device as the catalogue writes them: "1ae0:005e"."""
        return f"{self.vendor}:{self.device}"


def pci_devices(machine: Machine, vendor: str) -> Iterator[PciDevice]:
    """The devices of one vendor, in the bus's order."""
    for address in machine.entries(_FOLDER):
        if _id(machine, address, "vendor") == vendor:
            yield PciDevice(
                address,
                vendor,
                _id(machine, address, "device"),
                _id(machine, address, "subsystem_device"),
                _id(machine, address, "class"),
            )


def _id(machine: Machine, address: str, name: str) -> str:
    text = (machine.read(f"{_FOLDER}/{address}/{name}") or "").strip().lower()
    return text.removeprefix("0x")


def visible(count: int, text: str | None) -> tuple[int, ...]:
    """The ordinals that a list such as "0,2" leaves visible; all of them without one.

    As in CUDA: reading stops at the first entry that is no valid ordinal, and a repeated
    one leaves nothing.
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


def _leading_integer(text: str) -> int:
    """The integer that a text starts with (as C's strtoul reads "1gpu"), else -1."""
    digits = ""
    for character in text.removeprefix("+"):
        if not (character.isascii() and character.isdigit()):
            break
        digits += character
    return int(digits) if digits else -1
