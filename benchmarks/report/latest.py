"""Finds the results that the report's tables are made of: the newest of each machine, and all."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.checkout import RESULTS
from benchmarks.provenance import lines_of

MACHINES = {
    "intel-amx": "Xeon with AMX",
    "amd-zen5": "Zen 5",
    "amd-zen4": "Zen 4",
    "amd-zen3": "Zen 3",
}


def latest(name: str, suffix: str = "json", folder: Path = RESULTS) -> list[Path]:
    """The newest result of a benchmark on each machine: the newest first, of a day the fullest.

    Of files with a row for each task, an earlier one counts as well where it has tasks that the
    later ones do not have.
    """
    kept: list[Path] = []
    known: dict[str, set[str]] = {}
    for path in sorted(folder.glob(f"{name}-*.{suffix}"), reverse=True):
        text = path.read_text()
        family = re.search(r'"family": "([^"]+)"', text)
        machine = family[1] if family else ""
        tasks = set(re.findall(r'^{.*?"task": "([^"]+)"', text, re.MULTILINE))
        if machine not in known or tasks - known[machine]:
            kept.append(path)
        known.setdefault(machine, set()).update(tasks)
    day = len("-2026-11-22")
    return sorted(kept, key=lambda p: (p.stem[: len(name) + day], p.stat().st_size), reverse=True)


def newest_rows(name: str, folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The newest row of each task on each machine."""
    rows = [row for path in latest(name, "jsonl", folder) for row in lines_of(path)]
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        found.setdefault((row.get("family", ""), row["task"]), row)
    return list(found.values())


def measured_again(path: Path, told: Callable[[Path], Iterable[str]]) -> Iterator[str]:
    """What was measured again at a later commit of the same day, mostly a part of a result."""
    for later in sorted(path.parent.glob(f"{path.stem}-later*{path.suffix}")):
        commit = re.search(r'"commit": "([^"]+)"', later.read_text(encoding="utf-8"))
        yield ""
        yield (
            f"Measured again at commit {commit[1] if commit else 'unknown'} "
            f"(`benchmarks/results/{later.name}`):"
        )
        yield ""
        yield from told(later)


def machine_name(family: str) -> str:
    """A family as the tables name it; a new one by its name in the catalogue."""
    return MACHINES.get(family, family)


def where(found: Mapping[str, Any]) -> str:
    """When, on which machine and, where that was kept, of which commit a table was measured."""
    of = f", commit {found['commit']}" if "commit" in found else ""
    return f"{found['date']}, {machine_name(found.get('family', 'intel-amx'))}{of}"
