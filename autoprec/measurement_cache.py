"""Keeps device measurements, which can be repeated, in the user's cache directory.

A device's file is named after its fingerprint, the framework that timed it and its version, so that
it is never read for another. An unreadable file is left out with a note, never an error.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from autoprec.core.codec import DecodeError, from_plain, to_plain
from autoprec.core.device.facts import DeviceFacts, Fingerprint
from autoprec.core.device.measurements import Measurements
from autoprec.core.device.merging import with_measurements
from autoprec.yaml_files import MAX_FILE_BYTES, write_text

#: This environment variable names the cache folder; empty, nothing is kept.
FOLDER_VARIABLE = "AUTOPREC_CACHE"


@dataclass(frozen=True)
class TimedDevice:
    """A device's measurements with one framework of one version, and those made before, if any."""

    fingerprint: Fingerprint
    framework: str
    version: str
    measured: Measurements
    earlier: Measurements | None = None


def cache_folder() -> Path | None:
    """Return the cache folder; None if nothing is to be kept."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named is not None:
        return Path(named).expanduser() if named else None
    from platformdirs import user_cache_path

    return user_cache_path("autoprec", appauthor=False)


def remember(timed: TimedDevice) -> str:
    """Keep a device's measurements; return a note if they cannot be written, else ""."""
    path = _path(timed.fingerprint, timed.framework, timed.version)
    if path is None:
        return ""
    try:
        write_text(path, json.dumps(to_plain(timed), indent=1) + "\n")
    except OSError as error:
        return f"what was measured is not remembered: {path}: {error.strerror or error}"
    return ""


def recall(
    fingerprint: Fingerprint, software: Mapping[str, str]
) -> tuple[Measurements | None, tuple[str, ...]]:
    """Return a device's measurements, None if there are none, and notes of unreadable files.

    `software` maps names to versions; that of the first framework which timed the device counts.
    """
    timed, notes = _recall(fingerprint, software)
    return None if timed is None else timed.measured, notes


def _recall(
    fingerprint: Fingerprint, software: Mapping[str, str]
) -> tuple[TimedDevice | None, tuple[str, ...]]:
    notes: list[str] = []
    for framework, version in software.items():
        path = _path(fingerprint, framework, version)
        if path is None or not path.is_file():
            continue
        try:
            with path.open("rb") as file:
                timed = from_plain(TimedDevice, json.loads(file.read(MAX_FILE_BYTES)))
        except (OSError, ValueError, RecursionError, DecodeError) as error:
            problem = " ".join(str(error).split())[:200]
            notes.append(f"{path} cannot be read and is left out: {problem}")
            continue
        if (timed.fingerprint, timed.framework, timed.version) == (fingerprint, framework, version):
            return timed, tuple(notes)
        notes.append(f"{path} is of another device or version and is left out")
    return None, tuple(notes)


def with_remembered_measurements(facts: DeviceFacts, software: Mapping[str, str]) -> DeviceFacts:
    """Return the facts with what was measured on this device before, if anything was."""
    timed, notes = _recall(facts.fingerprint, software)
    known = facts if timed is None else with_measurements(facts, timed.measured, timed.earlier)
    return replace(known, notes=(*known.notes, *notes))


def _path(fingerprint: Fingerprint, framework: str, version: str) -> Path | None:
    folder = cache_folder()
    if folder is None:
        return None
    text = json.dumps([to_plain(fingerprint), framework, version], sort_keys=True)
    return folder / "measured" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
