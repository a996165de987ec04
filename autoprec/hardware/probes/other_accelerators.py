"""Accelerators that autoprec recognises but does not tune: a note says what to use instead.

They are read strictly from `profiles/other_accelerators.yaml`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cache

from autoprec.core.codec import DecodeError, from_plain
from autoprec.errors import CatalogueError
from autoprec.hardware.catalogue import profiles_folder
from autoprec.hardware.machine import Machine
from autoprec.hardware.probes import Findings
from autoprec.hardware.probes.pci import pci_devices
from autoprec.yaml_files import read_yaml


@dataclass(frozen=True)
class OtherAccelerator:
    """One product: its PCI ids ("1da3:1020"), and what to use instead of autoprec."""

    title: str
    pci: tuple[str, ...]
    advice: str
    source: str


@dataclass(frozen=True)
class _Document:
    accelerators: tuple[OtherAccelerator, ...]


@cache
def load_other_accelerators() -> tuple[OtherAccelerator, ...]:
    """Read all of them; raise `CatalogueError` with the file and the problem."""
    path = profiles_folder() / "other_accelerators.yaml"
    try:
        return from_plain(_Document, read_yaml(path, CatalogueError)).accelerators
    except DecodeError as error:
        raise CatalogueError(f"{path}: {error}") from error


def probe_other_accelerators(machine: Machine) -> Findings:
    """Note the accelerators on the bus that have a software stack of their own."""
    known = {pci: each for each in load_other_accelerators() for pci in each.pci}
    vendors = {pci.partition(":")[0] for pci in known}
    found = [device.id for vendor in sorted(vendors) for device in pci_devices(machine, vendor)]
    counts = Counter(known[pci] for pci in found if pci in known)
    return Findings(
        notes=tuple(
            f"{count} x {each.title} in this machine, which autoprec does not tune: {each.advice}"
            for each, count in counts.items()
        )
    )
