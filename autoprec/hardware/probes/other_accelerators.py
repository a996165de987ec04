"""Accelerators that autoprec recognises but does not tune: a note says what to use instead."""

from __future__ import annotations

from collections import Counter

from autoprec.hardware.catalogue import load_other_accelerators
from autoprec.hardware.machine import Machine
from autoprec.hardware.probes import Findings
from autoprec.hardware.probes.pci import pci_devices


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
