"""Leaves out of a module what only uses autoprec: the lines that integrating a profile adds.

These are imports of autoprec, a statement that binds or discards what `apply_profile` gives, or a
trainer's `apply`, `bind` and `plugin`, or None in its place, a call of that by itself
(`precision.restore()`), a Trainer's `plugins=[plugin(...)]`, `model = distribute(..., model)`,
`with precision.autocast():` around lines that stay, the same as a decorator, and an `if`, `try`,
`with` or loop around nothing else. A line that uses the result for something else is the user's
and stays as it is.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Sequence
from typing import Any

from autoprec.workers.local_modules import imports_of, nodes_of

PACKAGE = "autoprec"
_INTEGRATIONS = f"{PACKAGE}.integrations"
_APPLYING = ("apply_profile", "apply", "bind", "plugin", "fabric_plugin")
_CONTEXTS = ("autocast", "cast", "float32")


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
    return not node.level and _is_ours_module(module)


def _is_ours_module(name: str) -> bool:
    """Return whether a module has public names of autoprec."""
    return name == PACKAGE or f"{name}.".startswith(f"{_INTEGRATIONS}.")


class AutoprecNames:
    """The names in a module that stand for autoprec, and for what `apply_profile` returned."""

    def __init__(self, tree: ast.Module) -> None:
        self._modules: set[str] = set()
        self._public: dict[str, str] = {}
        self.results: set[str] = set()
        for imported in imports_of(tree):
            if isinstance(imported, ast.Import):
                named = [alias for alias in imported.names if _is_ours_module(alias.name)]
                self._modules |= {alias.asname or PACKAGE for alias in named}
            elif imported.module == _INTEGRATIONS and not imported.level:
                self._modules |= {each.asname or each.name for each in imported.names}
            elif _is_ours_import(imported):
                self._public |= {each.asname or each.name: each.name for each in imported.names}
        if not self.imported:
            return
        nodes = nodes_of(tree)
        while self._add_results(nodes):
            pass

    def _add_results(self, nodes: Sequence[ast.AST]) -> bool:
        """Note what statements bind to a result, or to a context of one; say whether any did."""
        before = len(self.results)
        for node in nodes:
            if isinstance(node, ast.Assign) and self.binds(node.value):
                targets = [getattr(target, "elts", [target]) for target in node.targets]
                self.results |= {ast.unparse(each) for target in targets for each in target}
            elif isinstance(node, ast.AnnAssign) and self.binds(node.value):
                self.results.add(ast.unparse(node.target))
            elif isinstance(node, ast.withitem) and self.is_ours(node.context_expr):
                self.results |= {ast.unparse(node.optional_vars)} if node.optional_vars else set()
        return len(self.results) > before

    @property
    def imported(self) -> bool:
        """Return whether the module imports autoprec at all."""
        return bool(self._modules or self._public)

    def binds(self, node: ast.expr | None) -> bool:
        """Say whether what a statement binds is a result: a call of `apply_profile`, a context.

        A test may decide between one and nothing, such as None or a `nullcontext()`.
        """
        if isinstance(node, ast.IfExp):
            either = (node.body, node.orelse)
            others = [each for each in either if not self.binds(each)]
            return len(others) < 2 and all(map(_is_nothing, others))
        if isinstance(node, ast.Attribute) and node.attr == "amp":
            return self.binds(node.value) or ast.unparse(node.value) in self.results
        if not isinstance(node, ast.Call):
            return False
        called = node.func
        if isinstance(called, ast.Attribute) and called.attr in _CONTEXTS:
            return ast.unparse(called.value) in self.results
        return self._public_name(called) in _APPLYING

    def is_bound_by(self, targets: Sequence[ast.expr], value: ast.expr | None) -> bool:
        """Say whether a statement only binds a result, or None to what elsewhere is one."""
        if self.binds(value):
            return True
        if isinstance(value, ast.Constant) and value.value is None:
            return all(ast.unparse(each) in self.results for each in targets)
        if not (isinstance(value, ast.Call) and self._public_name(value.func) == "distribute"):
            return False
        given = [*value.args[1:], *(each.value for each in value.keywords if each.arg == "model")]
        return bool(given) and all(ast.unparse(each) == ast.unparse(given[0]) for each in targets)

    def is_ours(self, node: ast.expr) -> bool:
        """Say whether an expression is a result, or a call of it or of a method of it."""
        if self.binds(node) or ast.unparse(node) in self.results:
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
        if not isinstance(called, ast.Attribute):
            return ""
        owner = ast.unparse(called.value)
        ours = owner in self._modules or (PACKAGE in self._modules and _is_ours_module(owner))
        return called.attr if ours else ""


def _is_nothing(node: ast.expr) -> bool:
    """Return whether an expression stands for no profile: a constant, or an empty context."""
    called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
    return isinstance(node, ast.Constant) or called.rpartition(".")[2] == "nullcontext"


class _Remover(ast.NodeTransformer):
    """Removes statements that only use autoprec; see the module."""

    def __init__(self, names: AutoprecNames) -> None:
        self._names = names

    def visit_Import(self, node: ast.Import) -> ast.Import | None:
        """Remove `import autoprec`, also from among others."""
        node.names = [alias for alias in node.names if not _is_ours_module(alias.name)]
        return node if node.names else None

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom | None:
        """Remove `from autoprec import ...`."""
        return None if _is_ours_import(node) else node

    def visit_Assign(self, node: ast.Assign) -> ast.Assign | None:
        """Remove `precision = apply_profile(...)`."""
        self.generic_visit(node)
        return None if self._names.is_bound_by(node.targets, node.value) else node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign | None:
        """Remove `precision: Precision = apply_profile(...)`."""
        self.generic_visit(node)
        return None if self._names.is_bound_by([node.target], node.value) else node

    def visit_Global(self, node: ast.Global) -> ast.Global | None:
        """Remove `global precision`."""
        node.names = [each for each in node.names if each not in self._names.results]
        return node if node.names else None

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        """Remove `apply_profile(...)`, `precision.restore()` and `log_to(...)`."""
        self.generic_visit(node)
        ours = self._names.is_ours(node.value) or self._names.calls(node.value)
        return None if ours else node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """Leave `plugin(...)` out of the plugins of a Trainer, and those out where no other is."""
        self.generic_visit(node)
        kept = []
        for keyword in node.keywords:
            given = keyword.value
            if keyword.arg == "plugins" and self._is_plugin(given):
                continue
            if keyword.arg == "plugins" and isinstance(given, ast.List) and given.elts:
                given.elts = [each for each in given.elts if not self._is_plugin(each)]
                if not given.elts:
                    continue
            kept.append(keyword)
        node.keywords = kept
        return node

    def _is_plugin(self, node: ast.expr) -> bool:
        return self._names.calls(node) or self._names.is_ours(node)

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
