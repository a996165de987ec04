"""Reads a folder of profiles, and compares it with the software installed here."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from autoprec.core.fleet.status import FleetStatus, fleet_status
from autoprec.hardware.machine import LocalMachine
from autoprec.hardware.probes.frameworks import find_frameworks
from autoprec.profiles import load_folder
from autoprec.version import __version__


def folder_status(folder: Path, prices: Mapping[str, float]) -> FleetStatus:
    """Return the status of the profiles in a folder, now and with the software installed here."""
    here = {each.name: each.version for each in find_frameworks(LocalMachine())}
    return fleet_status(
        load_folder(folder),
        now=datetime.now(UTC),
        here={**here, "autoprec": __version__},
        prices=prices,
    )
