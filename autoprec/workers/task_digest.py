"""Hashes the code of a task: what the worker runs of the task file and of the modules beside it.

A digest that changes with anything else would throw away trials that still hold. Of each module
counts what runs when it is imported, and those of its functions and classes that the task reaches
by their names: a training loop that the task does not use may change. Comments and layout do not
count, nor do lines that only use autoprec (see autoprec_lines.py). In a script the batch does not,
which a profile gives once it is applied: what was captured tells it.

Where names do not tell what is reached (a module that is passed on, `globals()`, a decorator that
may register what it decorates), everything of that module counts.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from autoprec.backends import registry
from autoprec.workers.autoprec_lines import PACKAGE, AutoprecNames, without_autoprec
from autoprec.workers.local_modules import (
    bindings_of_imports,
    imports_in,
    local_files,
    module_file,
    module_files,
    nodes_of,
    parsed,
)
from autoprec.workers.task_file import baseline_of
from autoprec.workers.task_source import TaskSource

#: What a task file is asked for; see `Task`.
_ROOTS = (
    *("build_model", "build_data", "loss_fn", "training_step", "build_optimizer", "evaluate"),
    *("count_samples", "BATCH_SIZE", "CLIP_GRAD_NORM"),
)

#: What can reach any name of a module without writing it.
_REACHES_ANYTHING = frozenset({"globals", "vars", "eval", "exec"})

#: Libraries whose decorators change what they decorate and note it nowhere, as the frameworks' do.
#: (torch.library's note it.) Other distributions' frameworks do not count here: a digest must not
#: depend on what is installed.
_PLAIN_DECORATORS = frozenset(
    {"click", "contextlib", "dataclasses", "functools", "hydra", "typing"}
).union(*((*each.required_modules, each.extra) for each in registry.built_in().values()))

#: Modules that do nothing to the process when they are imported.
_SILENT_MODULES = sys.stdlib_module_names | {PACKAGE}

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def task_digest(path: Path) -> str:
    """Hash (SHA-256) what a task is: its code as far as a worker runs it."""
    try:
        return _hash(path, list(_Reached(path).code()))
    except (RecursionError, MemoryError):  # code too deep to be looked into
        return whole_digest(path)


def source_digest(source: TaskSource, fingerprint: str = "") -> str:
    """Hash what a task's source is: of a task file its code, of others also how they are run.

    `fingerprint` is of what was captured of a script, whose code does not say it all.
    """
    if source.plain:
        return task_digest(source.path)
    roots = () if source.function is None else (source.function,)
    try:
        reached = _Reached(source.path, roots, as_main=source.script, with_batch=not fingerprint)
        code = _hash(source.path, list(reached.code()))
    except (RecursionError, MemoryError):
        code = whole_digest(source.path)
    words = [code, fingerprint, source.function or "", str(source.at), *source.arguments]
    return hashlib.sha256("\0".join(words).encode(errors="surrogateescape")).hexdigest()


def whole_digest(path: Path) -> str:
    """Hash all the code of the task file and of the modules it imports from its own folder.

    Profiles that autoprec 0.2.0 and earlier versions made have this digest.
    """
    return _hash(path, [(file, None) for file in local_files(path)])


def _hash(path: Path, files: list[tuple[Path, ast.Module | None]]) -> str:
    digest = hashlib.sha256()
    for file, code in files:
        digest.update(file.relative_to(path.parent).as_posix().encode(errors="replace") + b"\0")
        digest.update(_code_bytes(file, code) + b"\0")
    return digest.hexdigest()


def _code_bytes(file: Path, code: ast.Module | None) -> bytes:
    """Return code as bytes: a syntax tree, or the whole source where a file has none."""
    try:
        source = file.read_bytes()
    except OSError:  # the worker will say it better when the task imports it
        return b"unreadable"
    try:
        return ast.dump(code or ast.parse(source)).encode(errors="surrogatepass")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return source


class _Reached:
    """The part of a task's code that counts, file by file."""

    def __init__(
        self,
        path: Path,
        roots: tuple[str, ...] = _ROOTS,
        *,
        as_main: bool = False,
        with_batch: bool = True,
    ) -> None:
        self._path, self._top = path, path.parent
        self._as_main, self._with_batch = as_main, with_batch
        self._modules: dict[Path, _Module | None] = {}
        self._followed: set[tuple[Path, tuple[str, ...]]] = set()
        self._waiting: list[tuple[Path, tuple[str, ...]]] = []
        self._load(path)
        self._waiting += [(path, (name,)) for name in roots]
        self._follow_all()
        if any(module is not None and module.hooks_classes for module in self._modules.values()):
            for file in list(self._modules):
                self._reach_everything(file)
            self._follow_all()

    def code(self) -> Iterator[tuple[Path, ast.Module | None]]:
        """Yield each file that is imported, with what counts of it; None for one without a tree."""
        others = sorted(file for file in self._modules if file != self._path)
        for file in (self._path, *others):
            module = self._modules[file]
            yield file, None if module is None else module.counted()

    def _load(self, file: Path) -> _Module | None:
        """Note that a file is imported, with all that this runs."""
        if file not in self._modules:
            tree = parsed(file)
            module = None
            if tree is not None:
                tree = tree if self._with_batch else _WithoutBatch().visit(tree)
                task = file == self._path
                as_main = self._as_main and task
                module = _Module(tree, file, self._top, task=task and not as_main, as_main=as_main)
                self._waiting.append((file, ()))
            self._modules[file] = module
        return self._modules[file]

    def _follow_all(self) -> None:
        """Follow what was found, and what is found on the way, to its end."""
        while self._waiting:
            file, names = self._waiting.pop()
            module = self._modules[file]
            if module is None or (file, names) in self._followed:
                continue
            self._followed.add((file, names))
            if names:
                self._follow(file, module, names)
            else:  # the file itself, which runs when it is imported
                for node in module.run:
                    self._use(file, node)

    def _use(self, file: Path, node: ast.AST) -> None:
        """Follow the names and the imports in code that counts."""
        for folder, name in imports_in(node, self._top, file.parent):
            for imported in module_files(folder, name):
                self._load(imported)
        self._waiting += [(file, names) for names in _dotted_names(node)]

    def _follow(self, file: Path, module: _Module, names: tuple[str, ...]) -> None:
        """Count what a dotted name of a file stands for."""
        name, *more = names
        if name in _REACHES_ANYTHING or names[:2] == ("sys", "modules"):
            self._reach_everything(file)
        for node in module.definitions.get(name, ()):
            self._reach(file, node)
        for folder, imported, attribute in module.imports.get(name, ()):
            self._follow_import(folder, imported, (*attribute, *more))
        if name not in module.definitions and name not in module.imports:
            for folder, imported in module.star_imports:
                self._follow_import(folder, imported, names)

    def _follow_import(self, folder: Path, imported: str, names: tuple[str, ...]) -> None:
        """Count what `names` stand for in a module: an attribute of it, or all that it has."""
        file = module_file(folder, imported)
        if names:
            inner = module_file(folder, f"{imported}.{names[0]}".lstrip("."))
            if inner is not None:
                self._follow_import(folder, f"{imported}.{names[0]}".lstrip("."), names[1:])
        if file is not None and names:
            self._load(file)
            self._waiting.append((file, names))
        elif file is not None:
            self._reach_everything(file)

    def _reach(self, file: Path, node: ast.stmt) -> None:
        module = self._modules[file]
        if module is not None and id(node) not in module.reached:
            module.reached.add(id(node))
            self._use(file, node)

    def _reach_everything(self, file: Path) -> None:
        module = self._load(file)
        for nodes in [] if module is None else module.definitions.values():
            for node in nodes:
                self._reach(file, node)


class _Module:
    """One file: what runs when it is imported, what it defines, and where its names come from."""

    def __init__(
        self, tree: ast.Module, file: Path, top: Path, *, task: bool, as_main: bool
    ) -> None:
        read: list[Any] = [node for node in nodes_of(tree) if node.__class__ is ast.Name]
        names_read = {node.id for node in read if isinstance(node.ctx, ast.Load)}
        ours = AutoprecNames(tree)
        self._statements = without_autoprec(tree, ours)
        self.imports, self.star_imports = bindings_of_imports(tree, top, file.parent)
        self.definitions: dict[str, list[ast.stmt]] = {}
        self.run: list[ast.stmt] = []
        self.reached: set[int] = set()
        for node in self._statements:
            names = _silently_bound(node, ours)
            if task and baseline_of(node) is not None and not names & names_read:
                continue  # it is read without running the file, and changes nothing there
            if isinstance(node, Definition) and not self._registers(node):
                self.definitions.setdefault(node.name, []).append(node)
            elif names and names <= names_read:  # that they count, whoever reads them will say
                for name in names:
                    self.definitions.setdefault(name, []).append(node)
            elif as_main or not _is_main_guard(node):
                self.run.append(node)

    @property
    def hooks_classes(self) -> bool:
        """Return whether classes may be found by other means than their names."""
        nodes = [node for node in self._statements if isinstance(node, ast.ClassDef)]
        inner = (each for node in nodes for each in nodes_of(node))
        return any(
            isinstance(each, ast.FunctionDef) and each.name == "__init_subclass__" for each in inner
        )

    def counted(self) -> ast.Module:
        """Return the statements that count, in their order."""
        run = {id(node) for node in self.run}
        kept = [node for node in self._statements if id(node) in run or id(node) in self.reached]
        return ast.Module(body=kept, type_ignores=[])

    def _registers(self, node: Definition) -> bool:
        """Return whether a definition may become known by other means than its name."""
        if isinstance(node, ast.ClassDef) and node.keywords:
            return True
        return any(self._may_register(each) for each in node.decorator_list)

    def _may_register(self, decorator: ast.expr) -> bool:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = ast.unparse(called)
        root = name.partition(".")[0]
        homes = [imported.partition(".")[0] for _, imported, _ in self.imports.get(root, ())]
        plain = bool(homes) and all(home in _PLAIN_DECORATORS for home in homes)
        builtin = name in ("property", "staticmethod", "classmethod")
        return "library" in name or not (plain or builtin)


class _WithoutBatch(ast.NodeTransformer):
    """Leaves the batch out of calls: `batch_size=...`, and what `.batch(...)` is given first."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        """Look into a call."""
        self.generic_visit(node)
        node.keywords = [each for each in node.keywords if each.arg != "batch_size"]
        if isinstance(node.func, ast.Attribute) and node.func.attr == "batch":
            node.args = node.args[1:]
        return node


def _is_main_guard(node: ast.stmt) -> bool:
    """Say whether a statement is `if __name__ == "__main__":`; only a script's own runs."""
    return (
        isinstance(node, ast.If)
        and not node.orelse
        and ast.unparse(node.test) in ("__name__ == '__main__'", "'__main__' == __name__")
    )


def _silently_bound(node: ast.stmt, ours: AutoprecNames) -> set[str]:
    """Return the names that a statement binds and does nothing else; none for any other.

    They are constants, Python's own modules, and modules of autoprec and what that gives: who does
    not use them does not notice them.
    """
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if all(isinstance(each, ast.Name) for each in targets) and (
            _is_constant(node.value) or ours.gives(node.value)
        ):
            return {each.id for each in targets if isinstance(each, ast.Name)}
    if isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0):
        modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        modules += [each.name for each in node.names] if isinstance(node, ast.Import) else []
        if all(each.partition(".")[0] in _SILENT_MODULES for each in modules):
            names = {each.asname or each.name.partition(".")[0] for each in node.names}
            return set() if "*" in names else names
    return set()


def _is_constant(node: ast.expr) -> bool:
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        return all(map(_is_constant, node.elts))
    if isinstance(node, ast.UnaryOp):
        return _is_constant(node.operand)
    return isinstance(node, ast.Constant)


def _dotted_names(node: ast.AST) -> list[tuple[str, ...]]:
    """List every name in the code with the attributes asked of it: `a.b.c` as one."""
    nodes = nodes_of(node)
    found, inner_names = [], set()
    for each in nodes:  # the outer before the inner
        if each.__class__ not in (ast.Name, ast.Attribute):
            continue
        attributes: list[str] = []
        inner: Any = each
        while isinstance(inner, ast.Attribute):
            attributes.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name) and id(inner) not in inner_names:
            inner_names.add(id(inner))
            found.append((inner.id, *reversed(attributes)))
    return found
