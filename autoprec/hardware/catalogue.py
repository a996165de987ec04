"""The catalogue: every known family of hardware, read strictly from profiles/devices/*.yaml.

A row inherits everything from the row named by `from:` except what describes a single product: its
title, source, peaks, measured ratios and memory bandwidth. Knowledge of hardware belongs in those
files, not here. Users' own files, in a folder of theirs, add rows and replace none.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from autoprec.core.codec import DecodeError, abbreviate, bounded, did_you_mean, from_plain
from autoprec.core.device.family import DTypeRow, Family, Match
from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.core.dtypes import DType
from autoprec.errors import CatalogueError
from autoprec.yaml_files import read_yaml

T = TypeVar("T")

#: The environment variable that names the folder of the user's own device files.
USER_FOLDER_VARIABLE = "AUTOPREC_CATALOGUE"

_NOT_INHERITED = ("peak_dense_tflops", "measured_ratio")

#: Far more than hardware has generations; it bounds the time that a chain of rows can take.
_MAX_ANCESTORS = 20


@dataclass(frozen=True)
class _Row:
    """One row as written in the file; `from` is read as `parent`."""

    title: str
    source: str | tuple[str, ...]
    kind: DeviceKind | None = None
    parent: str = ""
    match: Match = field(default_factory=Match)
    features: tuple[str, ...] = ()
    padding: bool | None = None
    dtypes: Mapping[DType, DTypeRow] = field(default_factory=dict)
    memory_bandwidth_gbps: float | None = bounded(default=None, low=0.1, high=1e6)
    unified_memory: bool = False
    note: str = ""


@dataclass(frozen=True)
class _RawRow:
    """A row as read, the file it comes from, and `origin`: that file as users are told of it."""

    file: Path
    plain: Mapping[str, Any]
    origin: str = ""


class Catalogue:
    """Every known family by name; a row is checked and merged with its parents on first use."""

    def __init__(self, rows: Mapping[str, _RawRow]) -> None:
        self._rows = rows
        self._families: dict[str, Family] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all families."""
        return tuple(self._rows)

    @property
    def families(self) -> tuple[Family, ...]:
        """Return all families; raise `CatalogueError` if any row is wrong."""
        return tuple(self.family(name) for name in self._rows)

    def family(self, name: str) -> Family:
        """Return the family called `name`; raise `CatalogueError` if there is none."""
        if name not in self._rows:
            raise CatalogueError(f"unknown family {name!r}{did_you_mean(name, self._rows)}")
        if name not in self._families:
            for ancestor in reversed(_lineage(name, self._rows)[1:]):
                self.family(ancestor)
            self._families[name] = _build_family(name, self._rows)
        return self._families[name]

    def family_of(self, observation: Observation) -> Family:
        """Return the most specific family that describes the observed device."""
        of_kind = [self.family(n) for n in self._rows if self._kind(n) == observation.kind]
        found = [family for family in of_kind if matches(family, observation)]
        if not found:
            raise CatalogueError(
                f"no family of kind {observation.kind}: the catalogue is incomplete"
            )
        return max(found, key=_specificity)

    def _kind(self, name: str) -> object:
        return self._rows[_lineage(name, self._rows)[-1]].plain.get("kind")


@cache
def load_catalogue(folder: Path | None = None) -> Catalogue:
    """Read every family from `folder`; by default from autoprec's own files and the user's."""
    if folder is not None:
        return Catalogue(_read_folder(folder, {}))
    packaged = _read_folder(profiles_folder() / "devices", {})
    own = user_folder()
    return Catalogue(packaged if own is None else _read_folder(own, packaged))


def _read_folder(folder: Path, known: Mapping[str, _RawRow]) -> dict[str, _RawRow]:
    """Return the known rows and those of the folder's files, which must have new names."""
    rows = dict(known)
    for path in sorted(folder.glob("*.yaml")):
        for name, plain in _read_file(path).items():
            if name in rows:
                hint = f"; to refine it, give your row another name and 'from: {name}'"
                raise CatalogueError(
                    f"{path}: the family {name!r} is in {rows[name].file.name} already"
                    f"{hint if name in known else ''}"
                )
            rows[name] = _RawRow(path, plain, str(path) if known else path.name)
    if len(rows) == len(known):
        raise CatalogueError(
            f"{folder}: no device files (*.yaml with families)"
            f"{'' if known else '; is autoprec installed completely?'}"
        )
    return rows


def user_folder() -> Path | None:
    """Return the folder of the user's own device files, if there is one.

    The variable `AUTOPREC_CATALOGUE` names it; an empty one says that there is none. Without the
    variable it is `devices` in the user's configuration directory for autoprec, if that has files.
    """
    named = os.environ.get(USER_FOLDER_VARIABLE)
    if named is not None:
        return Path(named).expanduser() if named else None
    from platformdirs import user_config_path

    folder = user_config_path("autoprec", appauthor=False) / "devices"
    return folder if any(folder.glob("*.yaml")) else None


def profiles_folder() -> Path:
    """Return the folder of data files: in the installed package, or next to it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "_profiles"
    return installed if installed.is_dir() else package.parent / "profiles"


def _read_file(path: Path) -> Mapping[str, Mapping[str, Any]]:
    """Return the rows of one file by name, as plain mappings; `from` becomes `parent`."""
    document = read_yaml(path, CatalogueError)
    if not isinstance(document, Mapping) or list(document) != ["families"]:
        raise CatalogueError(f"{path}: expected one key, families")
    families = document["families"]
    if not isinstance(families, Mapping):
        raise CatalogueError(f"{path}: families: expected a mapping of rows")
    rows = {}
    for name, row in families.items():
        if not isinstance(name, str) or not isinstance(row, Mapping):
            raise CatalogueError(f"{path}: families.{name}: expected a mapping")
        if "parent" in row:
            raise CatalogueError(
                f"{path}: families.{name}.parent: unknown key; did you mean 'from'?"
            )
        rows[name] = {("parent" if key == "from" else key): item for key, item in row.items()}
    return rows


def _build_family(name: str, rows: Mapping[str, _RawRow]) -> Family:
    """Check a row and merge it with its parents, which were checked before."""
    _decode(_Row, rows[name].plain, name, rows)
    lineage = _lineage(name, rows)
    merged: dict[str, Any] = {}
    for ancestor in reversed(lineage):
        merged = _inherit(merged, rows[ancestor].plain)
    source = rows[name].plain["source"]
    merged |= {
        "name": name,
        "source": [source] if isinstance(source, str) else source,
        "ancestors": lineage[1:],
        "origin": rows[name].origin,
    }
    return _decode(Family, merged, name, rows)


def _decode(kind: type[T], plain: object, name: str, rows: Mapping[str, _RawRow]) -> T:
    try:
        return from_plain(kind, plain, f"families.{name}")
    except DecodeError as error:
        raise CatalogueError(f"{rows[name].file}: {error}") from error


def _lineage(name: str, rows: Mapping[str, _RawRow]) -> list[str]:
    """Return the names of the row and its ancestors, nearest first."""
    lineage = [name]
    while parent := rows[lineage[-1]].plain.get("parent"):
        at = f"{rows[lineage[-1]].file}: families.{lineage[-1]}.from"
        if not isinstance(parent, str) or parent not in rows:
            raise CatalogueError(
                f"{at}: unknown family {abbreviate(parent)}{did_you_mean(parent, rows)}"
            )
        if parent in lineage:
            raise CatalogueError(f"{at}: {parent!r} inherits from itself")
        if len(lineage) == _MAX_ANCESTORS:
            raise CatalogueError(f"{at}: more than {_MAX_ANCESTORS} ancestors; inherit from fewer")
        lineage.append(parent)
    return lineage


def _inherit(parent: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a row with its parent, conditions and dtypes key by key, without its figures."""
    dtypes = {
        dtype: {key: value for key, value in facts.items() if key not in _NOT_INHERITED}
        for dtype, facts in parent.get("dtypes", {}).items()
    }
    for dtype, facts in row.get("dtypes", {}).items():
        inherited = dtypes.get(dtype, {})
        if "support" in facts:
            inherited = {key: value for key, value in inherited.items() if key != "reason"}
        dtypes[dtype] = {**inherited, **facts}
    merged = {
        "title": row["title"],
        "match": {**parent.get("match", {}), **row.get("match", {})},
        "dtypes": dtypes,
    }
    for key in ("kind", "features", "padding", "unified_memory", "note"):
        if key in row or key in parent:
            merged[key] = row.get(key, parent.get(key))
    if "memory_bandwidth_gbps" in row:
        merged["memory_bandwidth_gbps"] = row["memory_bandwidth_gbps"]
    return merged


# Which families describe an observation ---------------------------------------------------------


def matches(family: Family, observation: Observation) -> bool:
    """Return whether every condition of the family holds for the observation."""
    match = family.match
    return (
        family.kind is observation.kind
        and _found(match.name, observation.name)
        and _found(match.board, observation.board)
        and _equal(match.vendor, observation.vendor)
        and _equal(match.architecture, observation.architecture)
        and _capable(match.compute_capability, observation.compute_capability)
        and _equal(match.pci, observation.pci)
        and _equal(match.pci_subsystem, observation.pci_subsystem)
        and _equal(match.implementer, observation.implementer)
        and _equal(match.part, observation.part)
        and _within(match.cpu_family, observation.cpu_family)
        and _within(match.cpu_model, observation.cpu_model)
        and observation.features.issuperset(match.features)
        and observation.features.isdisjoint(match.lacks)
    )


def _specificity(family: Family) -> tuple[int, int]:
    """Rank how narrow a family is: its depth in the tree, then its number of conditions."""
    conditions = sum(bool(getattr(family.match, each.name)) for each in fields(Match))
    return len(family.ancestors), conditions


def _found(patterns: Iterable[str], text: str) -> bool:
    patterns = tuple(patterns)
    return not patterns or any(re.search(pattern, text, re.IGNORECASE) for pattern in patterns)


def _equal(texts: Iterable[str], text: str) -> bool:
    texts = tuple(each.lower() for each in texts)
    return not texts or text.lower() in texts


def _capable(ranges: Iterable[str], text: str) -> bool:
    """Tell whether a compute capability is in ranges such as "9.0" (exactly) and "8.0-" (from)."""
    ranges = tuple(ranges)
    if not ranges or not re.fullmatch(r"\d+\.\d+", text):
        return not ranges
    version = _version(text)
    for each in ranges:
        low = _version(each.removesuffix("-"))
        if version == low or (each.endswith("-") and version > low):
            return True
    return False


def _version(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    return int(major), int(minor)


def _within(ranges: Iterable[str], number: int | None) -> bool:
    """Return whether a number is in ranges such as "17" and "16-31"."""
    ranges = tuple(ranges)
    if not ranges or number is None:
        return not ranges
    for text in ranges:
        low, _, high = text.partition("-")
        if int(low) <= number <= int(high or low):
            return True
    return False


# Accelerators that are not tuned ----------------------------------------------------------------


@dataclass(frozen=True)
class OtherAccelerator:
    """One product: its PCI ids ("1da3:1020"), and what to use instead of autoprec."""

    title: str
    pci: tuple[str, ...]
    advice: str
    source: str


@dataclass(frozen=True)
class _OtherAccelerators:
    accelerators: tuple[OtherAccelerator, ...]


@cache
def load_other_accelerators() -> tuple[OtherAccelerator, ...]:
    """Read all of them; raise `CatalogueError` with the file and the problem."""
    path = profiles_folder() / "other_accelerators.yaml"
    try:
        return from_plain(_OtherAccelerators, read_yaml(path, CatalogueError)).accelerators
    except DecodeError as error:
        raise CatalogueError(f"{path}: {error}") from error
