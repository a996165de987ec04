"""Reads YAML documents strictly and writes files whole.

PyYAML alone lets a second key silently replace the first, lets an alias make a small file huge,
and knows tags. Here: one document, plain values, no aliases, no merge keys, no duplicate keys, a
limit on size and depth. Writing is atomic: a reader sees the old file or the new one.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import yaml

from autoprec.core.codec import show
from autoprec.errors import UsageError

#: More than any file of ours needs; it keeps a wrong path (a model, a log) from being parsed.
LARGEST_FILE_BYTES = 1_000_000
DEEPEST = 40

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(path: Path, error: type[UsageError] = UsageError) -> object:
    """Read one YAML document as plain values; raise `error` naming the file, line and problem."""
    try:
        if path.stat().st_size > LARGEST_FILE_BYTES:
            raise error(f"{path}: larger than {LARGEST_FILE_BYTES} bytes, which no such file is")
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError as problem:
        raise error(f"{path}: there is no such file") from problem
    except (OSError, UnicodeDecodeError, ValueError) as problem:
        raise error(f"{path}: cannot be read: {problem}") from problem
    return parse_yaml(text, str(path), error)


def parse_yaml(text: str, where: str, error: type[UsageError] = UsageError) -> object:
    """Parse one YAML document as plain values; `where` names it in errors."""
    try:
        _check_depth(text)
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _check(node, where, error)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError, RecursionError, OverflowError) as problem:
        first = " ".join(str(problem).split())[:300]
        raise error(f"{where}: not valid YAML: {first}") from problem


def _check_depth(text: str) -> None:
    """Refuse nesting deeper than `DEEPEST` before the parser meets it, in linear time."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            depth += 1
            if depth > DEEPEST:
                raise ValueError(f"nested deeper than {DEEPEST} levels")
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            depth -= 1
        elif isinstance(event, yaml.AliasEvent):
            raise ValueError(f"{event.start_mark}: YAML aliases are not used here; write it out")


def _check(node: yaml.Node, where: str, error: type[UsageError]) -> None:
    """Refuse a key given twice in one mapping, merge keys and keys that are not scalars."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check(item, where, error)
    if isinstance(node, yaml.MappingNode):
        keys = set()
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                raise error(f"{where}, line {line}: expected plain keys")
            if key.value in keys:
                raise error(f"{where}, line {line}: the key {show(key.value)} is given twice")
            keys.add(key.value)
            _check(value, where, error)


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all: into a temporary file beside it, then renamed.

    Raises OSError (disk full, no permission) with the old file, if any, as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    _sync_folder(path.parent)


def _umask() -> int:
    current = os.umask(0o022)
    os.umask(current)
    return current


def _sync_folder(folder: Path) -> None:
    """Make the rename last through a power cut, where folders can be synced."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
