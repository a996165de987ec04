"""Finds the results that the report's tables are made of: the newest of each machine, and all."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.checkout import RESULTS
from benchmarks.provenance import lines_of

MACHINES = {
    "intel-amx": "Xeon with AMX",
    "intel-emerald-rapids": "Emerald Rapids",
    "amd-zen5": "Zen 5",
    "amd-zen4": "Zen 4",
    "amd-zen3": "Zen 3",
    "nvidia-h200": "NVIDIA H200",
    "nvidia-h100-sxm": "NVIDIA H100 80GB HBM3",
}

NOT_KEPT = "machine not kept"

#: Results that name no machine; the commits that added them do.
XEONS = ("overhead-2026-11-21.json", "peers-2026-11-21.jsonl", "startup-2026-11-21.json")

#: What makes a run's lines.
Told = Callable[[Path], Iterable[str]]


def latest(name: str, suffix: str = "json", folder: Path = RESULTS) -> list[Path]:
    """The newest result of a benchmark on each machine: the newest first, of a day the fullest.

    Of files with a row for each task, an earlier one counts as well where it has tasks that the
    later ones do not have.
    """
    kept: list[Path] = []
    known: dict[str, set[str]] = {}
    for path in sorted(folder.glob(f"{name}-*.{suffix}"), reverse=True):
        text = path.read_text(encoding="utf-8")
        machine = head_of(path).get("family", "")
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


def earlier_days(path: Path) -> list[Path]:
    """The results of the same benchmark on the same machine of days before, the newest first."""
    name, day = name_and_day(path)
    family = head_of(path).get("family")
    found = [p for p in path.parent.glob(f"{name}-*{path.suffix}") if name_and_day(p)[0] == name]
    older = [p for p in found if name_and_day(p)[1] < day and head_of(p).get("family") == family]
    return sorted(older, key=lambda p: (name_and_day(p)[1], p.stem), reverse=True)


def other_runs(path: Path, told: Told, *, older: bool = False) -> Iterator[str]:
    """What was measured besides, worse or better: `-earlier` and `-later` of the same day.

    Where `older`, also the runs of days before.
    """
    for word, said in (("later", "Measured again"), ("earlier", "An earlier run")):
        for run in sorted(path.parent.glob(f"{path.stem}-{word}*{path.suffix}")):
            yield from _other_run(run, said, told)
    for run in earlier_days(path) if older else ():
        yield from _other_run(run, f"An earlier run, of {name_and_day(run)[1]},", told)


def _other_run(path: Path, said: str, told: Told) -> Iterator[str]:
    commit = re.search(r'"commit": "([^"]+)"', path.read_text(encoding="utf-8"))
    of = f"at commit {commit[1]}" if commit else "at a commit that was not kept"
    yield ""
    yield f"{said} {of} (`benchmarks/results/{path.name}`):"
    yield ""
    yield from told(path)


def head_of(path: Path) -> dict[str, Any]:
    """What a result says of itself: a file's first row, or the file; with its file's date."""
    text = path.read_text(encoding="utf-8")
    found = json.loads(text.splitlines()[0] if path.suffix == ".jsonl" else text)
    known = {"date": name_and_day(path)[1]}
    if path.name in XEONS:
        known["family"] = "intel-amx"
    return {**known, **found} if isinstance(found, dict) else known


def name_and_day(path: Path) -> tuple[str, str]:
    """The benchmark and the date that a result's file is named after."""
    found = re.match(r"(.+?)-(\d{4}-\d\d-\d\d)", path.stem)
    return (found[1], found[2]) if found else (path.stem, "")


def machine_name(family: str) -> str:
    """A family as the tables name it; a new one by its name in the catalogue."""
    return MACHINES.get(family, family)


def where(found: Mapping[str, Any]) -> str:
    """When, on which machine and, where that was kept, of which commit a table was measured."""
    of = f", commit {found['commit']}" if "commit" in found else ""
    machine = machine_name(found["family"]) if "family" in found else NOT_KEPT
    return f"{found['date']}, {machine}{of}"
