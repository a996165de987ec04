"""Profile files: read strictly, written whole.

The format is `core.profile.Profile` as YAML. Nothing in a file is run, and no path in it is opened.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from autoprec.core.codec import DecodeError, abbreviate, to_plain, without_empty
from autoprec.core.profile import SCHEMA, Profile
from autoprec.core.profile.earlier import EARLIER, profile_from_plain
from autoprec.core.recipe import Recipe, plain_recipe
from autoprec.errors import ProfileError
from autoprec.profile_comments import HEADER, with_comments
from autoprec.yaml_files import read_yaml, write_text

SUFFIX = ".profile.yaml"
_INCONCLUSIVE = ".inconclusive"
REPORT_SUFFIX = ".report.html"

#: The file of `autoprec schema` that profiles point editors to.
SCHEMA_NAME = "autoprec.schema.json"


def default_path(task: Path) -> Path:
    """Return the default path of a task's profile: next to the task file."""
    return task.with_name(task.stem + SUFFIX)


def default_report_path(profile: Path) -> Path:
    """Return the default path of a report: next to the profile, or in a folder of profiles."""
    if profile.is_dir():
        return profile / f"profiles{REPORT_SUFFIX}"
    return profile.with_name(
        profile.name.removesuffix(SUFFIX).removesuffix(".yaml") + REPORT_SUFFIX
    )


def load_profile(path: str | Path) -> Profile:
    """Read a profile file; `ProfileError` says what is wrong with it and where."""
    file = Path(path)
    if file.is_dir():
        raise ProfileError(f"{file} is a folder; give one profile file (apply_profile takes both)")
    if not file.exists():
        raise ProfileError(
            f"{file}: there is no such file; `autoprec tune TASK.py` writes TASK{SUFFIX} next to it"
        )
    if file.suffix == ".py":
        own = default_path(file)
        has = f"{file.name}'s is {own}" if own.exists() else f"`autoprec tune {file}` writes {own}"
        raise ProfileError(f"{file} is no profile: {_EXPECTED}; {has}")
    try:
        document = read_yaml(file, ProfileError)
    except ProfileError as error:
        if not file.is_file() or file.suffix in (".yaml", ".yml"):
            raise
        raise ProfileError(f"{file} is no profile: {_EXPECTED}") from error
    return parse_profile(document, str(file))


_EXPECTED = "expected a file that `autoprec tune` wrote (MODEL.profile.yaml)"


def parse_profile(document: object, where: str) -> Profile:
    """Read a profile from plain values."""
    if document is None:
        raise ProfileError(f"{where}: the file is empty; write a profile with `autoprec tune`")
    if not isinstance(document, dict):
        raise ProfileError(f"{where} is no profile: {_EXPECTED}")
    if not {"schema", "recipe"} & document.keys():
        raise ProfileError(f"{where} is no profile: it has no recipe; {_EXPECTED}")
    schema = document.get("schema")
    if schema not in (*EARLIER, SCHEMA) or type(schema) is not int:
        given = "no schema" if schema is None else f"schema {abbreviate(schema)}"
        known = ", ".join(map(str, EARLIER))
        raise ProfileError(
            f"{where}: {given} given, this autoprec reads schema {known} and {SCHEMA}; tune again, "
            "or install the version that wrote it"
        )
    try:
        return profile_from_plain(document)
    except DecodeError as error:
        raise ProfileError(
            f"{where}: {error} (correct the file, or write a new one with `autoprec tune`)"
        ) from error


def load_folder(folder: Path) -> dict[str, Profile]:
    """Load every profile in a folder, by file name; files ending in .yaml or .yml count."""
    try:
        files = sorted(p for p in folder.iterdir() if p.suffix in (".yaml", ".yml") and p.is_file())
    except OSError as error:
        raise ProfileError(f"{folder}: cannot be read: {error.strerror}; give a folder") from error
    if not files:
        raise ProfileError(f"{folder}: no profile (*.yaml) in this folder; write one with tune")
    return {file.name: load_profile(file) for file in files}


def to_mapping(profile: Profile) -> dict[str, Any]:
    """Return the profile as plain values: its file's content, which `autoprec tune --json` prints.

    Empty evidence (nulls, zeros, empty lists) is left out.
    """
    plain: dict[str, Any] = to_plain(profile)
    evidence = without_empty(profile.evidence)
    if "tried" in evidence:
        evidence["tried"] = [without_empty(each) for each in profile.evidence.tried]
    return {**plain, "recipe": plain_recipe(profile.recipe), "evidence": evidence}


class _Dumper(yaml.SafeDumper):
    """Writes short lists on one line, and never an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


class _InlineList(list[Any]):
    """A list that is written between brackets."""


class _InlineMapping(dict[str, Any]):
    """A mapping that is written between braces."""


def _represent_float(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    """Write a float so that YAML 1.1 reads the same one back: an exponent needs a point."""
    text = repr(value)
    if "e" in text and "." not in text:
        text = text.replace("e", ".0e")
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    """Write text so that it reads back: with escapes if it is not all printable.

    Text that UTF-8 cannot hold (a file name that is no text) gets question marks.
    """
    text = value.encode("utf-8", "replace").decode("utf-8")
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _represent_inline(dumper: yaml.SafeDumper, value: Any) -> yaml.Node:
    if isinstance(value, dict):
        return dumper.represent_mapping("tag:yaml.org,2002:map", value, flow_style=True)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True)


_Dumper.add_representer(_InlineMapping, _represent_inline)
_Dumper.add_representer(_InlineList, _represent_inline)
_Dumper.add_representer(float, _represent_float)
_Dumper.add_representer(str, _represent_text)


def dump_recipe(recipe: Recipe) -> str:
    """Return a recipe as YAML text, as a profile has it."""
    text: str = yaml.dump(plain_recipe(recipe), Dumper=_Dumper, sort_keys=False, width=100)
    return text


def dump_profile(profile: Profile) -> str:
    """Return the profile as YAML text, with comments that explain its keys."""
    plain = _with_inline_tables(to_mapping(profile))
    text: str = yaml.dump(plain, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
    return HEADER + with_comments(text)


def _with_inline_tables(plain: dict[str, Any]) -> dict[str, Any]:
    """Mark what is a table of numbers, so that it does not take a line for each of them."""
    evidence = dict(plain["evidence"])
    if "tried" in evidence:
        evidence["tried"] = [_InlineMapping(row) for row in evidence["tried"]]
    if "curves" in evidence["parity"]:
        curves = {name: _InlineList(v) for name, v in evidence["parity"]["curves"].items()}
        evidence["parity"] = {**evidence["parity"], "curves": curves}
    return {**plain, "evidence": evidence}


def save_profile(profile: Profile, path: Path) -> None:
    """Write a profile file whole or not at all.

    It begins with the line that shows editors its schema, where `autoprec schema` has written that
    next to it or in a folder above.
    """
    write_text(path, _schema_line(path) + dump_profile(profile))


def save_result(profile: Profile, path: Path) -> Path:
    """Write the profile of a tuning to the place that `place_for` names; return that place."""
    place = place_for(profile, path)
    save_profile(profile, place)
    return place


def place_for(profile: Profile, path: Path) -> Path:
    """Return where the profile of a tuning that was to be at `path` is written.

    An inconclusive one never replaces a conclusive one: it is written beside it.
    """
    if not profile.evidence.inconclusive or not path.exists():
        return path
    try:
        known = load_profile(path)
    except ProfileError:
        return path
    return path if known.evidence.inconclusive else _beside(path)


def _beside(path: Path) -> Path:
    """Return the name of an inconclusive profile beside a conclusive one."""
    suffix = SUFFIX if path.name.endswith(SUFFIX) else path.suffix
    return path.with_name(f"{path.name.removesuffix(suffix)}{_INCONCLUSIVE}{suffix}")


def kept_beside(kept: Path, new: Path) -> str:
    """Say where an inconclusive profile was written, and which one was kept; "" if none was."""
    if kept == new:
        return ""
    return (
        f"this tuning was inconclusive: the earlier profile in {kept}, which is not, was kept, and "
        f"the new one is in {new}"
    )


def _schema_line(path: Path) -> str:
    for up, folder in enumerate(Path(os.path.abspath(path)).parents):
        if os.path.isfile(folder / SCHEMA_NAME):  # false if nothing may be looked at
            return f"# yaml-language-server: $schema={'../' * up}{SCHEMA_NAME}\n"
    return ""
