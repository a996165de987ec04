"""Finds the modules that a task imports from its own folder, without running anything."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, cast


def local_files(path: Path) -> list[Path]:
    """List the task file and every file that it imports from its folder, also inside functions."""
    found: dict[Path, None] = {}
    waiting = [path]
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found[file] = None
        tree = parsed(file)
        for folder, name in [] if tree is None else imports_in(tree, path.parent, file.parent):
            waiting += module_files(folder, name)
    return [path, *sorted(file for file in found if file != path)]


def nodes_of(tree: ast.AST) -> list[ast.AST]:
    """List a syntax tree's nodes, the outer before the inner.

    As ast.walk does, but without a dozen calls for each node: an expression may have many.
    """
    found = [tree]
    for node in found:
        for value in node.__dict__.values():
            if value.__class__ is list:
                for each in value:
                    if each.__class__.__module__ == "ast":
                        found += [each]
            elif value.__class__.__module__ == "ast":
                found += [value]
    return found


def imports_of(tree: ast.AST) -> list[ast.Import | ast.ImportFrom]:
    """List the import statements in code."""
    kinds = (ast.Import, ast.ImportFrom)
    return [cast(Any, node) for node in nodes_of(tree) if node.__class__ in kinds]


def parsed(file: Path) -> ast.Module | None:
    """Return a file's syntax tree; None if it cannot be read or has none."""
    try:
        return ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, OSError, RecursionError, MemoryError):
        return None


Binding = tuple[Path, str, tuple[str, ...]]
"""Where a name is imported from: a folder, a module's dotted name, and what of the module."""


def imports_in(node: ast.AST, top: Path, own: Path) -> list[tuple[Path, str]]:
    """List (folder, dotted name) of all modules that imports in `node` may run.

    An absolute import starts at the folder `top`, a relative one at the file's own.
    """
    found: list[tuple[Path, str]] = []
    for each in imports_of(node):
        if isinstance(each, ast.Import):
            found += [(top, alias.name) for alias in each.names]
        elif isinstance(each, ast.ImportFrom):
            folder, base = _import_base(each, top, own)
            names = [base, *(f"{base}.{alias.name}".lstrip(".") for alias in each.names)]
            found += [(folder, name) for name in names]
    return [(folder, name) for folder, name in found if name and folder.is_relative_to(top)]


def bindings_of_imports(
    tree: ast.AST, top: Path, own: Path
) -> tuple[dict[str, list[Binding]], list[tuple[Path, str]]]:
    """Return what each imported name is bound to, and the modules of which all names are."""
    names: dict[str, list[Binding]] = {}
    stars: list[tuple[Path, str]] = []
    for node in imports_of(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name if alias.asname else alias.name.partition(".")[0]
                names.setdefault(alias.asname or whole, []).append((top, whole, ()))
        elif isinstance(node, ast.ImportFrom):
            folder, base = _import_base(node, top, own)
            for alias in node.names:
                if alias.name == "*":
                    stars.append((folder, base))
                else:
                    bound = (folder, base, (alias.name,))
                    names.setdefault(alias.asname or alias.name, []).append(bound)
    return names, stars


def _import_base(node: ast.ImportFrom, top: Path, own: Path) -> tuple[Path, str]:
    """Return the folder and the dotted name that `from ... import` imports from."""
    return top if not node.level else _ancestor(own, node.level - 1), node.module or ""


def _ancestor(folder: Path, levels: int) -> Path:
    return folder.parents[levels - 1] if 0 < levels <= len(folder.parents) else folder


def module_files(folder: Path, name: str) -> list[Path]:
    """List the files below `folder` that importing `name` runs, the module's own last."""
    found = []
    place = folder
    for part in name.split("."):
        place = place / part
        found += [place.with_name(f"{part}.py"), place / "__init__.py"]
    return [file for file in found if _is_file(file)]


def module_file(folder: Path, name: str) -> Path | None:
    """Return the file that the module `name` is; None if it is not below `folder`."""
    if not name:
        return _first_file(folder / "__init__.py")
    place = folder.joinpath(*name.split("."))
    return _first_file(place / "__init__.py", place.with_name(f"{place.name}.py"))


def _first_file(*paths: Path) -> Path | None:
    return next((path for path in paths if _is_file(path)), None)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
