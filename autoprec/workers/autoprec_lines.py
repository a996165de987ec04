"""Leaves out of a module what only uses autoprec: the lines that integrating a profile adds.

These are imports of autoprec, a statement that binds or discards what `apply_profile` gives, a call
of that by itself (`precision.restore()`), and `with precision.autocast():` around lines that stay.
A line that uses the result for something else is the user's and stays as it is.
"""

from __future__ import annotations

import ast
import copy

from autoprec.workers.local_modules import imports_of, nodes_of

_PACKAGE = "autoprec"
_APPLYING = "apply_profile"


def without_autoprec(tree: ast.Module) -> list[ast.stmt]:
    """Return the statements of a module without what only uses autoprec; `tree` stays as it is."""
    if not any(_is_ours_import(node) for node in imports_of(tree)):
        return tree.body
    names = _Names(tree)
    left = _Remover(names).visit(copy.deepcopy(tree))
    body: list[ast.stmt] = left.body
    return body


def _is_ours_import(node: ast.AST) -> bool:
    """Say whether a statement imports public names of autoprec and nothing else."""
    if isinstance(node, ast.Import):
        return all(alias.name == _PACKAGE for alias in node.names)
    return isinstance(node, ast.ImportFrom) and not node.level and node.module == _PACKAGE


class _Names:
    """The names in a module that stand for autoprec, and for what `apply_profile` returned."""

    def __init__(self, tree: ast.Module) -> None:
        self._package: set[str] = set()
        self._functions: set[str] = set()
        self.results: set[str] = set()
        for node in nodes_of(tree):
            if isinstance(node, ast.Import):
                named = [alias for alias in node.names if alias.name == _PACKAGE]
                self._package |= {alias.asname or alias.name for alias in named}
            elif isinstance(node, ast.ImportFrom) and _is_ours_import(node):
                named = [alias for alias in node.names if alias.name == _APPLYING]
                self._functions |= {alias.asname or alias.name for alias in named}
        for node in nodes_of(tree):
            if isinstance(node, ast.Assign) and self.applies(node.value):
                self.results |= {ast.unparse(target) for target in node.targets}
            elif isinstance(node, ast.AnnAssign) and self.applies(node.value):
                self.results.add(ast.unparse(node.target))
            elif isinstance(node, ast.withitem) and self.applies(node.context_expr):
                self.results |= {ast.unparse(node.optional_vars)} if node.optional_vars else set()

    def applies(self, node: ast.expr | None) -> bool:
        """Say whether an expression is a call of `apply_profile`."""
        if not isinstance(node, ast.Call):
            return False
        called = ast.unparse(node.func)
        package, _, function = called.rpartition(".")
        return called in self._functions or (package in self._package and function == _APPLYING)

    def is_ours(self, node: ast.expr) -> bool:
        """Say whether an expression is a call of `apply_profile`, or of a method of its result."""
        if self.applies(node):
            return True
        method = node.func if isinstance(node, ast.Call) else None
        return isinstance(method, ast.Attribute) and ast.unparse(method.value) in self.results


class _Remover(ast.NodeTransformer):
    """Removes statements that only use autoprec; see the module."""

    def __init__(self, names: _Names) -> None:
        self._names = names

    def visit_Import(self, node: ast.Import) -> ast.Import | None:
        """Remove `import autoprec`."""
        return None if _is_ours_import(node) else node

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom | None:
        """Remove `from autoprec import ...`."""
        return None if _is_ours_import(node) else node

    def visit_Assign(self, node: ast.Assign) -> ast.Assign | None:
        """Remove `precision = apply_profile(...)`."""
        return None if self._names.applies(node.value) else node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign | None:
        """Remove `precision: Precision = apply_profile(...)`."""
        return None if self._names.applies(node.value) else node

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        """Remove `apply_profile(...)` and `precision.restore()`."""
        return None if self._names.is_ours(node.value) else node

    def visit_With(self, node: ast.With) -> ast.With | list[ast.stmt]:
        """Leave the lines inside `with precision.autocast():` alone."""
        self.generic_visit(node)
        others = [item for item in node.items if not self._names.is_ours(item.context_expr)]
        if not others:
            return node.body
        node.items = others
        return node
