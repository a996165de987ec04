"""The catalogue: every known family of hardware, read strictly from profiles/devices/*.yaml.

A row inherits everything from the row named by `from:` except what describes a single product: its
title, source, peaks, measured ratios and memory bandwidth. Knowledge of hardware belongs in those
files, not here. Users' own files, in a folder of theirs, add rows and replace none.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from autoprec.core.codec import DecodeError, abbreviate, did_you_mean, from_plain
from autoprec.core.device.family import Family, Match
from autoprec.core.device.observation import Observation
from autoprec.errors import CatalogueError
from autoprec.yaml_files import read_yaml

#: The environment variable that names the folder of the user's own device files.
USER_FOLDER_VARIABLE = "AUTOPREC_CATALOGUE"

#: What describes a single product, and not those of the rows below it.
_NOT_INHERITED = {"title", "source", "memory_bandwidth_gbps", "peak_dense_tflops", "measured_ratio"}

#: Far more than hardware has generations; it bounds the time that a chain of rows can take.
_MAX_ANCESTORS = 20


@dataclass(frozen=True)
class _Row:
    """A row as read, the file it comes from, and `origin`: that file as users are told of it."""

    file: Path
    plain: Mapping[str, Any]
    origin: str = ""


class Catalogue:
    """Every known family by name; a row is checked and merged with its parents on first use."""

    def __init__(self, rows: Mapping[str, _Row]) -> None:
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
                self.family(ancestor)  # so that an error is told of the row it is in
            self._families[name] = _build_family(name, self._rows)
        return self._families[name]

    def family_of(self, observation: Observation) -> Family:
        """Return the most specific family that describes the observed device."""
        of_kind = [self.family(n) for n in self._rows if self._kind(n) == observation.kind]
        matching = [family for family in of_kind if matches(family, observation)]
        if not matching:
            raise CatalogueError(
                f"no family of kind {observation.kind}: the catalogue is incomplete"
            )
        return max(matching, key=_specificity)

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


def _read_folder(folder: Path, known: Mapping[str, _Row]) -> dict[str, _Row]:
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
            rows[name] = _Row(path, plain, str(path) if known else path.name)
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
        for key in ("parent", "name", "ancestors", "origin"):
            if key in row:
                hint = "; did you mean 'from'?" if key == "parent" else ""
                raise CatalogueError(f"{path}: families.{name}.{key}: unknown key{hint}")
        rows[name] = {("parent" if key == "from" else key): item for key, item in row.items()}
    return rows


def _build_family(name: str, rows: Mapping[str, _Row]) -> Family:
    """Merge a row with its parents, which were checked before, and check it."""
    lineage, merged = _lineage(name, rows), dict[str, Any]()
    for ancestor in reversed(lineage):
        merged = _inherit(merged, rows[ancestor].plain)
    merged |= {"name": name, "ancestors": lineage[1:], "origin": rows[name].origin}
    if isinstance(merged.get("source"), str):
        merged["source"] = [merged["source"]]
    try:
        return from_plain(Family, merged, f"families.{name}")
    except DecodeError as error:
        raise CatalogueError(f"{rows[name].file}: {error}") from error


def _lineage(name: str, rows: Mapping[str, _Row]) -> list[str]:
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
    merged = {**_inheritable(parent), **row}
    merged.pop("parent", None)
    merged["match"] = _over(parent.get("match", {}), row.get("match", {}))
    merged["dtypes"] = {dtype: _inheritable(f) for dtype, f in parent.get("dtypes", {}).items()}
    own = row.get("dtypes", {})
    if not isinstance(own, Mapping):
        return {**merged, "dtypes": own}
    for dtype, facts in own.items():
        inherited = merged["dtypes"].get(dtype, {})
        if isinstance(facts, Mapping) and "support" in facts:
            inherited.pop("reason", None)
        merged["dtypes"][dtype] = _over(inherited, facts)
    return merged


def _inheritable(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in _NOT_INHERITED}


def _over(below: Mapping[str, Any], above: Any) -> Any:
    """Put a mapping over another; what is none is left to be refused as it is."""
    return {**below, **above} if isinstance(above, Mapping) else above


# Which families describe an observation ---------------------------------------------------------


def matches(family: Family, observation: Observation) -> bool:
    """Return whether every condition of the family holds for the observation."""
    match = family.match
    return (
        family.kind is observation.kind
        and observation.features.issuperset(match.features)
        and observation.features.isdisjoint(match.lacks)
        and all(
            holds(wanted, getattr(observation, name))
            for name, holds in _CONDITIONS.items()
            if (wanted := getattr(match, name))
        )
    )


def _specificity(family: Family) -> tuple[int, int]:
    """Rank how narrow a family is: its depth in the tree, then its number of conditions."""
    conditions = sum(bool(getattr(family.match, each.name)) for each in fields(Match))
    return len(family.ancestors), conditions


def _found(patterns: Iterable[str], text: str) -> bool:
    return any(re.search(pattern, text, re.IGNORECASE) for pattern in patterns)


def _equal(texts: Iterable[str], text: str) -> bool:
    return text.lower() in (each.lower() for each in texts)


def _capable(ranges: Iterable[str], text: str) -> bool:
    """Tell whether a compute capability is in ranges such as "9.0" (exactly) and "8.0-" (from)."""
    if not re.fullmatch(r"\d+\.\d+", text):
        return False
    version = _version(text)
    lows = [(_version(each.removesuffix("-")), each.endswith("-")) for each in ranges]
    return any(version == low or (newer and version > low) for low, newer in lows)


def _version(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")))


def _within(ranges: Iterable[str], number: int | None) -> bool:
    """Return whether a number is in ranges such as "17" and "16-31"."""
    ends = [[int(end) for end in each.split("-")] for each in ranges]
    return number is not None and any(each[0] <= number <= each[-1] for each in ends)


#: How a condition of a row is compared with what was observed under the same name.
_CONDITIONS: Mapping[str, Callable[[tuple[str, ...], Any], bool]] = {
    **dict.fromkeys(("name", "board"), _found),
    **dict.fromkeys(("vendor", "architecture", "pci", "pci_subsystem"), _equal),
    **dict.fromkeys(("implementer", "part"), _equal),
    **dict.fromkeys(("cpu_family", "cpu_model"), _within),
    "compute_capability": _capable,
}


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
