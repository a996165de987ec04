"""Reading a YAML file of ours strictly: safe, small, no aliases, no duplicate keys.

PyYAML alone lets a second key silently replace the first, and lets aliases make a small file huge.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from autoprec.core.codec import show
from autoprec.errors import CatalogueError

#: More than any file of ours needs; it keeps a wrong path (a model, a log) from being parsed.
LARGEST_FILE_BYTES = 1_000_000
DEEPEST_NESTING = 50

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_yaml(path: Path) -> object:
    """Read one YAML document as plain values; raise `CatalogueError` naming the file and line."""
    try:
        if path.stat().st_size > LARGEST_FILE_BYTES:
            raise CatalogueError(f"{path}: larger than {LARGEST_FILE_BYTES} bytes")
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CatalogueError(f"{path}: cannot be read: {error}") from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, where: str) -> object:
    """Parse one YAML document as plain values; `where` names it in errors."""
    try:
        _check_events(text, where)
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _check_keys(node, where)
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError) as error:
        first = " ".join(str(error).split())
        raise CatalogueError(f"{where}: not valid YAML: {first}") from error


def _check_events(text: str, where: str) -> None:
    """Refuse aliases, and nesting so deep that libyaml's recursion would end the process."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        line = event.start_mark.line + 1 if event.start_mark else 0
        if isinstance(event, yaml.AliasEvent):
            raise CatalogueError(f"{where}, line {line}: YAML aliases are not used; write it out")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > DEEPEST_NESTING:
            raise CatalogueError(f"{where}, line {line}: nested too deeply")


def _check_keys(node: yaml.Node, where: str) -> None:
    """Refuse a key that is given twice in one mapping, or is no plain text."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_keys(item, where)
    if isinstance(node, yaml.MappingNode):
        keys = set()
        for key, value in node.value:
            at = f"{where}, line {key.start_mark.line + 1}"
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                raise CatalogueError(f"{at}: expected plain keys")
            if key.value in keys:
                raise CatalogueError(f"{at}: the key {show(key.value)} is given twice")
            keys.add(key.value)
            _check_keys(value, where)
