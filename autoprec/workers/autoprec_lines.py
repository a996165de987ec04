"""Leaves out of a module what only uses autoprec: the lines that integrating a profile adds.

These are imports of autoprec, a statement that binds or discards what `apply_profile` gives, or a
trainer's `apply` and `bind`, a call of that by itself (`precision.restore()`), a Trainer's
`plugins=[plugin(...)]`, `with precision.autocast():` around lines that stay, the same as a
decorator, and an `if`, `try`, `with` or loop around nothing else. A line that uses the
result for something else is the user's and stays as it is.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence
from typing import Any

from autoprec.workers.local_modules import imports_of, nodes_of

PACKAGE = "autoprec"
_INTEGRATIONS = f"{PACKAGE}.integrations."
_APPLYING = ("apply_profile", "apply", "bind")


def without_autoprec(tree: ast.Module, names: AutoprecNames) -> list[ast.stmt]:
    """Return the statements of a module without what only uses autoprec; `tree` stays as it is."""
    if not names.imported:
        return tree.body
    left = _Remover(names).visit(copy.deepcopy(tree))
    left = _UnreadRemover(names, left).visit(left)
    body: list[ast.stmt] = left.body
    return body


def _is_ours_import(node: ast.ImportFrom) -> bool:
    """Return whether a statement imports public names of autoprec."""
    module = node.module or ""
    return not node.level and (module == PACKAGE or module.startswith(_INTEGRATIONS))


class AutoprecNames:
    """The names in a module that stand for autoprec, and for what `apply_profile` returned."""

    def __init__(self, tree: ast.Module) -> None:
        self._package: set[str] = set()
        self._public: dict[str, str] = {}
        self.results: set[str] = set()
        for imported in imports_of(tree):
            if isinstance(imported, ast.Import):
                named = [alias for alias in imported.names if alias.name == PACKAGE]
                self._package |= {alias.asname or alias.name for alias in named}
            elif _is_ours_import(imported):
                self._public |= {each.asname or each.name: each.name for each in imported.names}
        if not self.imported:
            return
        for node in nodes_of(tree):
            if isinstance(node, ast.Assign) and self.applies(node.value):
                targets = [getattr(target, "elts", [target]) for target in node.targets]
                self.results |= {ast.unparse(each) for target in targets for each in target}
            elif isinstance(node, ast.AnnAssign) and self.applies(node.value):
                self.results.add(ast.unparse(node.target))
            elif isinstance(node, ast.withitem) and self.applies(node.context_expr):
                self.results |= {ast.unparse(node.optional_vars)} if node.optional_vars else set()

    @property
    def imported(self) -> bool:
        """Return whether the module imports autoprec at all."""
        return bool(self._package or self._public)

    def applies(self, node: ast.expr | None) -> bool:
        """Say whether an expression is a call of `apply_profile`, also one that a test decides."""
        if isinstance(node, ast.IfExp):
            either = (node.body, node.orelse)
            others = [each for each in either if not self.applies(each)]
            return len(others) < 2 and all(isinstance(each, ast.Constant) for each in others)
        if isinstance(node, ast.Attribute) and node.attr == "amp":
            return self.applies(node.value) or ast.unparse(node.value) in self.results
        return isinstance(node, ast.Call) and self._public_name(node.func) in _APPLYING

    def is_ours(self, node: ast.expr) -> bool:
        """Say whether an expression is a call of `apply_profile`, or of a method of its result."""
        if self.applies(node):
            return True
        called = node.func if isinstance(node, ast.Call) else None
        owner = called.value if isinstance(called, ast.Attribute) else called
        return owner is not None and ast.unparse(owner) in self.results

    def calls(self, node: ast.expr) -> bool:
        """Return whether an expression is a call of any function of autoprec."""
        return isinstance(node, ast.Call) and bool(self._public_name(node.func))

    def gives(self, node: ast.expr | None) -> bool:
        """Say whether a value comes from autoprec: such a call, or an attribute of its result."""
        while isinstance(node, ast.Attribute):
            node = node.value
        return node is not None and self.calls(node)

    def _public_name(self, called: ast.expr) -> str:
        """Return what is called of autoprec; "" for anything else."""
        if isinstance(called, ast.Name):
            return self._public.get(called.id, "")
        inner = called.value if isinstance(called, ast.Attribute) else None
        package = isinstance(inner, ast.Name) and inner.id in self._package
        return called.attr if package and isinstance(called, ast.Attribute) else ""


class _Remover(ast.NodeTransformer):
    """Removes statements that only use autoprec; see the module."""

    def __init__(self, names: AutoprecNames) -> None:
        self._names = names

    def visit_Import(self, node: ast.Import) -> ast.Import | None:
        """Remove `import autoprec`, also from among others."""
        node.names = [alias for alias in node.names if alias.name != PACKAGE]
        return node if node.names else None

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
        """Remove `apply_profile(...)`, `precision.restore()` and `log_to(...)`."""
        ours = self._names.is_ours(node.value) or self._names.calls(node.value)
        return None if ours else node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """Leave `plugin(...)` out of the plugins of a Trainer, and those out where no other is."""
        self.generic_visit(node)
        kept = []
        for keyword in node.keywords:
            given = keyword.value
            if keyword.arg == "plugins" and isinstance(given, ast.List) and given.elts:
                given.elts = [each for each in given.elts if not self._names.calls(each)]
                if not given.elts:
                    continue
            kept.append(keyword)
        node.keywords = kept
        return node

    def visit_With(self, node: ast.With) -> ast.stmt | list[ast.stmt] | None:
        """Leave the lines inside `with precision.autocast():` alone."""
        self.generic_visit(node)
        others = [item for item in node.items if not self._names.is_ours(item.context_expr)]
        if not others or not node.body:
            return node.body
        node.items = others
        return node

    def visit_Try(self, node: ast.Try) -> ast.stmt | list[ast.stmt]:
        """Leave out a `try` around nothing else, with what it does where that fails."""
        self.generic_visit(node)
        return node if node.body else [*node.orelse, *node.finalbody]

    def visit_If(self, node: ast.If) -> ast.stmt | None:
        """Leave out an `if` with nothing else in it."""
        self.generic_visit(node)
        return node if node.body or node.orelse else None

    def visit_For(self, node: ast.For) -> ast.stmt | None:
        """Leave out a loop with nothing else in it."""
        self.generic_visit(node)
        return node if node.body or node.orelse else None

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """Remove `@precision.autocast()`."""
        self.generic_visit(node)
        node.decorator_list = [
            each for each in node.decorator_list if not self._names.is_ours(each)
        ]
        return node


class _UnreadRemover(ast.NodeTransformer):
    """Removes what functions bind of autoprec and nothing that is left reads."""

    def __init__(self, names: AutoprecNames, left: ast.Module) -> None:
        self._names = names
        nodes: Sequence[Any] = [node for node in nodes_of(left) if isinstance(node, ast.Name)]
        self._read = {node.id for node in nodes if isinstance(node.ctx, ast.Load)}
        self._in_function = False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        """Look into a function."""
        outside, self._in_function = self._in_function, True
        self.generic_visit(node)
        self._in_function = outside
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.Assign | None:
        """Remove `profile = load_profile(...)` where only removed lines used it."""
        unread = all(
            isinstance(each, ast.Name) and each.id not in self._read for each in node.targets
        )
        return None if self._in_function and unread and self._names.gives(node.value) else node
