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
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _check(node, where, set())
            return loader.construct_document(node)
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        first = " ".join(str(error).split())
        raise CatalogueError(f"{where}: not valid YAML: {first}") from error


def _check(node: yaml.Node, where: str, seen: set[int]) -> None:
    """Refuse a node met twice (an alias) and a key given twice in one mapping."""
    line = node.start_mark.line + 1
    if id(node) in seen:
        raise CatalogueError(f"{where}, line {line}: YAML aliases are not used here; write it out")
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check(item, where, seen)
    if isinstance(node, yaml.MappingNode):
        keys = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                raise CatalogueError(f"{where}, line {line}: expected plain keys")
            if key.value in keys:
                at = key.start_mark.line + 1
                raise CatalogueError(
                    f"{where}, line {at}: the key {show(key.value)} is given twice"
                )
            keys.add(key.value)
            _check(key, where, seen)
            _check(value, where, seen)
