"""Finds the results that the report's tables are made of: the newest of each machine, and all."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.checkout import RESULTS

MACHINES = {
    "intel-amx": "Xeon with AMX",
    "amd-zen5": "Zen 5",
    "amd-zen4": "Zen 4",
    "amd-zen3": "Zen 3",
}


def latest(name: str, suffix: str = "json", folder: Path = RESULTS) -> list[Path]:
    """The newest result of a benchmark on each machine: the newest first, of a day the fullest."""
    newest: dict[str, Path] = {}
    for path in sorted(folder.glob(f"{name}-*.{suffix}")):
        family = re.search(r'"family": "([^"]+)"', path.read_text())
        newest[family[1] if family else ""] = path
    day = len("-2026-11-22")
    return sorted(
        newest.values(), key=lambda p: (p.stem[: len(name) + day], p.stat().st_size), reverse=True
    )


def machine_name(family: str) -> str:
    """A family as the tables name it; a new one by its name in the catalogue."""
    return MACHINES.get(family, family)


def where(found: Mapping[str, Any]) -> str:
    """When, on which machine and, where that was kept, of which commit a table was measured."""
    of = f", commit {found['commit']}" if "commit" in found else ""
    return f"{found['date']}, {machine_name(found.get('family', 'intel-amx'))}{of}"
