"""One probe for each vendor's way of showing its devices.

A probe takes a `Machine` and returns `Findings`; what it cannot read becomes a note.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoprec.core.device.observation import Observation
from autoprec.core.device.probe_result import Unusable


@dataclass(frozen=True)
class Findings:
    """What a probe found: devices, notes, and devices that cannot be used."""

    devices: tuple[Observation, ...] = ()
    notes: tuple[str, ...] = ()
    unusable: tuple[Unusable, ...] = ()
