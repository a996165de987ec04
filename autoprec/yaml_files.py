"""Reads YAML documents strictly and writes files whole.

PyYAML alone lets a second key silently replace the first, lets an alias make a small file huge,
makes dates of text and knows tags. Here: one document of plain values (text, finite numbers, true,
false, null, lists, and mappings with text as keys), no aliases, tags, directives or merge keys, and
limits on size, depth and count, so that no input takes long. Unknown keys, wrong types and numbers
out of range are refused by `core.codec`, for every file alike. Writing is atomic: a reader sees the
old file or the new one.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import yaml

from autoprec.core.codec import abbreviate
from autoprec.errors import UsageError

#: More than any file of ours needs; it keeps a wrong path (a model, a log) from being parsed.
MAX_FILE_BYTES = 1_000_000
MAX_VALUES = 20_000
MAX_DEPTH = 40

#: A plain word longer than this is text, whatever it looks like: no number of ours is.
_MAX_NUMBER_LENGTH = 64

#: The parser's time grows with the square of the number of directives.
_DIRECTIVE = re.compile("(?:^|[\r\n\x85\u2028\u2029\ufeff])%")

_TAG = "tag:yaml.org,2002:"

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(path: Path, error: type[UsageError] = UsageError) -> object:
    """Read one YAML document as plain values; raise `error` naming the file, line and problem."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise error(f"{path}: larger than {MAX_FILE_BYTES} bytes, which no such file is")
        text = data.decode("utf-8")
    except FileNotFoundError as problem:
        raise error(f"{path}: there is no such file") from problem
    except UnicodeDecodeError as problem:
        raise error(f"{path}: cannot be read: it is not UTF-8 text") from problem
    except (OSError, ValueError) as problem:
        raise error(f"{path}: cannot be read: {problem}") from problem
    return parse_yaml(text, str(path), error)


def parse_yaml(text: str, where: str, error: type[UsageError] = UsageError) -> object:
    """Parse one YAML document as plain values, None if it is empty; `where` names it in errors."""
    if _DIRECTIVE.search(text):
        raise error(f"{where}: YAML directives (lines that start with %) are not used here")
    try:
        loader = _Loader(text)
        try:
            return _Reader(loader, where, error).document()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as problem:
        mark = problem.problem_mark or problem.context_mark
        line = f", line {mark.line + 1}" if mark else ""
        raise error(f"{where}{line}: not valid YAML: {problem.problem}") from problem
    except (yaml.YAMLError, ValueError) as problem:
        first = " ".join(str(problem).split())[:200]
        raise error(f"{where}: not valid YAML: {first}") from problem


class _Reader:
    """Makes plain values of the parser's events, one after another, and refuses the rest."""

    def __init__(self, loader: Any, where: str, error: type[UsageError]) -> None:
        self._loader = loader
        self._where = where
        self._error = error
        self._values = 0

    def document(self) -> object:
        """Read the whole stream, which must hold one document or none."""
        self._loader.get_event()
        if isinstance(self._loader.get_event(), yaml.StreamEndEvent):
            return None
        value = self._value(self._loader.get_event(), 0)
        self._loader.get_event()
        event = self._loader.get_event()
        if not isinstance(event, yaml.StreamEndEvent):
            self._refuse(event, "a second document begins; expected one")
        return value

    def _value(self, event: Any, depth: int) -> object:
        self._values += 1
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            self._refuse(event, "YAML aliases are not used; write it out")
        if event.tag is not None:
            self._refuse(
                event, f"YAML tags ({abbreviate(event.tag)}) are not used; write a plain value"
            )
        if self._values > MAX_VALUES:
            self._refuse(event, f"more than {MAX_VALUES} values, which no such file holds")
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event)
        if depth >= MAX_DEPTH:
            self._refuse(event, f"nested too deeply: {MAX_DEPTH} levels are allowed")
        if isinstance(event, yaml.SequenceStartEvent):
            return self._sequence(depth + 1)
        return self._mapping(depth + 1)

    def _sequence(self, depth: int) -> list[object]:
        items = []
        while not isinstance(event := self._loader.get_event(), yaml.SequenceEndEvent):
            items.append(self._value(event, depth))
        return items

    def _mapping(self, depth: int) -> dict[str, object]:
        items: dict[str, object] = {}
        while not isinstance(event := self._loader.get_event(), yaml.MappingEndEvent):
            key = self._value(event, depth) if isinstance(event, yaml.ScalarEvent) else None
            if not isinstance(key, str) or (event.implicit[0] and key == "<<"):
                given = (
                    abbreviate(event.value)
                    if isinstance(event, yaml.ScalarEvent)
                    else "a collection"
                )
                self._refuse(event, f"{given} given as a key, expected plain keys: quote it")
            if key in items:
                self._refuse(event, f"the key {abbreviate(key)} is given twice")
            items[key] = self._value(self._loader.get_event(), depth)
        return items

    def _scalar(self, event: Any) -> object:
        text: str = event.value
        if not event.implicit[0] or len(text) > _MAX_NUMBER_LENGTH:
            return text
        tag = self._loader.resolve(yaml.ScalarNode, text, (True, False)).removeprefix(_TAG)
        if tag not in ("null", "bool", "int", "float"):
            return text
        node = yaml.ScalarNode(_TAG + tag, text)
        try:
            value: object = self._loader.construct_object(node)
        except (ValueError, OverflowError):
            self._refuse(event, f"{abbreviate(text)} is not a number")
        if isinstance(value, float) and not math.isfinite(value):
            self._refuse(event, f"{abbreviate(text)} given, expected a finite number")
        return value

    def _refuse(self, event: Any, problem: str) -> NoReturn:
        raise self._error(f"{self._where}, line {event.start_mark.line + 1}: {problem}")


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all: into a temporary file next to it, then renamed.

    A symbolic link stays one: what it points to is written. Raises OSError (disk full, no
    permission) with the old file, if any, as it was.
    """
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name[:32]}.", dir=target.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    _sync_folder(target.parent)


def _umask() -> int:
    current = os.umask(0o022)
    os.umask(current)
    return current


def _sync_folder(folder: Path) -> None:
    """Make the rename last through a power cut, if folders can be synced."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
