"""The catalogue: every known family of hardware, read strictly from profiles/devices/*.yaml.

A row inherits from the one named by `from:` everything but what belongs to one product alone: its
title, source, peaks, measured ratios and memory bandwidth. Knowledge of hardware belongs into those
files, not here. Users' own files, in a folder of theirs, add rows to them and replace none.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from autoprec.core.codec import DecodeError, abbreviate, bounded, did_you_mean, from_plain
from autoprec.core.device.facts import DeviceKind, DTypeRow, Family, Match, Observation
from autoprec.core.dtypes import DType
from autoprec.documents import read_yaml
from autoprec.errors import CatalogueError
from autoprec.hardware.matching import matches, specificity

T = TypeVar("T")

#: Names the folder of the user's own device files.
OWN_FOLDER = "AUTOPREC_CATALOGUE"

_NOT_INHERITED = ("peak_dense_tflops", "measured_ratio")

#: Many more than hardware has generations; it keeps a chain of rows from taking long.
_MOST_ANCESTORS = 20


@dataclass(frozen=True)
class _Row:
    """One row as it stands in the file; `from` is read as `parent`."""

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
class _Source:
    """A row as read, and the file it was read from: `origin` as users are told of it."""

    file: Path
    plain: Mapping[str, Any]
    origin: str = ""


class Catalogue:
    """Every known family, by name; a row is checked and merged with its parents when first used."""

    def __init__(self, rows: Mapping[str, _Source]) -> None:
        self._rows = rows
        self._families: dict[str, Family] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all families."""
        return tuple(self._rows)

    @property
    def families(self) -> tuple[Family, ...]:
        """All families; raises `CatalogueError` if any row is wrong."""
        return tuple(self.family(name) for name in self._rows)

    def family(self, name: str) -> Family:
        """The family called `name`; raise `CatalogueError` if there is none."""
        if name not in self._rows:
            raise CatalogueError(f"unknown family {name!r}{did_you_mean(name, self._rows)}")
        if name not in self._families:
            for ancestor in reversed(_lineage(name, self._rows)[1:]):
                self.family(ancestor)
            self._families[name] = _family(name, self._rows)
        return self._families[name]

    def family_of(self, observation: Observation) -> Family:
        """The most specific family that describes what was observed."""
        of_kind = [self.family(n) for n in self._rows if self._kind(n) == observation.kind]
        found = [family for family in of_kind if matches(family, observation)]
        if not found:
            raise CatalogueError(
                f"no family of kind {observation.kind}: the catalogue is incomplete"
            )
        return max(found, key=specificity)

    def _kind(self, name: str) -> object:
        return self._rows[_lineage(name, self._rows)[-1]].plain.get("kind")


@cache
def load_catalogue(folder: Path | None = None) -> Catalogue:
    """Read every family from `folder`; by default from autoprec's own files and the user's."""
    if folder is not None:
        return Catalogue(_read(folder, {}))
    packaged = _read(profiles_folder() / "devices", {})
    own = own_folder()
    return Catalogue(packaged if own is None else _read(own, packaged))


def _read(folder: Path, known: Mapping[str, _Source]) -> dict[str, _Source]:
    """The rows that are known and those of the folder's files, which may have no name of theirs."""
    rows = dict(known)
    for path in sorted(folder.glob("*.yaml")):
        for name, plain in _rows(path).items():
            if name in rows:
                hint = f"; to refine it, give your row another name and 'from: {name}'"
                raise CatalogueError(
                    f"{path}: the family {name!r} is in {rows[name].file.name} already"
                    f"{hint if name in known else ''}"
                )
            rows[name] = _Source(path, plain, str(path) if known else path.name)
    if len(rows) == len(known):
        raise CatalogueError(
            f"{folder}: no device files (*.yaml with families)"
            f"{'' if known else '; is autoprec installed completely?'}"
        )
    return rows


def own_folder() -> Path | None:
    """Where the user's own device files are, if anywhere.

    The variable `AUTOPREC_CATALOGUE` names the folder, or, empty, says that there is none. Without
    it, `devices` in the user's configuration directory for autoprec counts if it has such files.
    """
    named = os.environ.get(OWN_FOLDER)
    if named is not None:
        return Path(named).expanduser() if named else None
    from platformdirs import user_config_path

    folder = user_config_path("autoprec", appauthor=False) / "devices"
    return folder if any(folder.glob("*.yaml")) else None


def profiles_folder() -> Path:
    """Where the data files are: inside an installed package, else beside it in the source tree."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "_profiles"
    return installed if installed.is_dir() else package.parent / "profiles"


def _rows(path: Path) -> Mapping[str, Mapping[str, Any]]:
    """The rows of one file by name, as plain mappings; `from` becomes `parent`."""
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


def _family(name: str, rows: Mapping[str, _Source]) -> Family:
    """Merge a row, checked here, with its parents, checked before."""
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


def _decode(kind: type[T], plain: object, name: str, rows: Mapping[str, _Source]) -> T:
    try:
        return from_plain(kind, plain, f"families.{name}")
    except DecodeError as error:
        raise CatalogueError(f"{rows[name].file}: {error}") from error


def _lineage(name: str, rows: Mapping[str, _Source]) -> list[str]:
    """The row and its ancestors, nearest first."""
    lineage = [name]
    while parent := rows[lineage[-1]].plain.get("parent"):
        at = f"{rows[lineage[-1]].file}: families.{lineage[-1]}.from"
        if not isinstance(parent, str) or parent not in rows:
            raise CatalogueError(
                f"{at}: unknown family {abbreviate(parent)}{did_you_mean(parent, rows)}"
            )
        if parent in lineage:
            raise CatalogueError(f"{at}: {parent!r} inherits from itself")
        if len(lineage) == _MOST_ANCESTORS:
            raise CatalogueError(f"{at}: more than {_MOST_ANCESTORS} ancestors; inherit from fewer")
        lineage.append(parent)
    return lineage


def _inherit(parent: Mapping[str, Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """A row over its parent: conditions and dtypes key by key; a parent's figures stay with it."""
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
