"""What is tuned: a task file, a training script with its arguments, or a function of a file.

A task file defines `build_model` and `build_data`; any other Python file is a script, which a
worker runs up to its own call of `fit` or `train`. Which of them a file is, its syntax tree says:
nothing of it runs here.
"""

from __future__ import annotations

import ast
import difflib
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoprec.errors import UsageError
from autoprec.workers.local_modules import module_file, nodes_of, parsed
from autoprec.workers.task_file import check_task_path

#: What a task file defines. A script may happen to define one of them, too, or import both.
_OF_A_TASK_FILE = ("build_model", "build_data")

#: A file that calls what has one of these names trains a model by itself.
_TRAINING_CALLS = frozenset({"fit", "train", "backward", "apply_gradients"})
_SIMILARITY_CUTOFF = 0.85


SENT = ".pickle"
"""How the files end that objects travel in."""


@dataclass(frozen=True)
class TaskSource:
    """Where a task comes from: the task file `path`, or what the other fields say of it.

    `function` names a function of the file that returns what is trained. A `script` is run with
    `arguments` as sys.argv has them, up to its call number `at` that trains, counted from 1.
    """

    path: Path
    function: str | None = None
    arguments: tuple[str, ...] = ()
    at: int = 1
    script: bool = False

    @property
    def name(self) -> str:
        """Return the file's name, with the function's: "train.py:build"; of objects their name."""
        if self.sent:
            return self.path.stem
        return self.path.name if self.function is None else f"{self.path.name}:{self.function}"

    @property
    def plain(self) -> bool:
        """Return whether the file's code alone says what the task is."""
        return self.function is None and not self.script and not self.sent

    @property
    def sent(self) -> bool:
        """Return whether the file holds objects of another process; see `sent_objects`."""
        return self.path.suffix == SENT

    def __str__(self) -> str:
        """Return what a command line would say: the path, the function, the arguments."""
        place = str(self.path) if self.function is None else f"{self.path}:{self.function}"
        return " ".join([place, *(["--", shlex.join(self.arguments)] if self.arguments else [])])


def read_source(
    given: Any, *, arguments: Iterable[str] = (), at: int = 1, script: bool = False
) -> TaskSource:
    """Return what `given` names: "task.py", "train.py" or "train.py:build", checked.

    `script` takes a file for a script whatever it defines. Raises `UsageError` for what cannot be,
    and as `check_task_path` does.
    """
    if isinstance(given, TaskSource):
        return given
    if not isinstance(given, str | Path):
        raise UsageError(
            f"a {type(given).__name__} given, expected the path of a file here: 'task.py', "
            "'train.py' or 'train.py:build'"
        )
    place, function = _split(given)
    words = tuple(arguments)
    path = check_task_path(place)
    if function is not None and (script or at != 1):
        said = "script" if script else "at"
        raise UsageError(
            f"{given}: `{said}` is for a script that runs as it is, and {function} is a function "
            f"to be called: leave out `{said}`, or `:{function}`"
        )
    if function is not None or script or not _is_task_file(path):
        return TaskSource(path, function, words, at, script=function is None)
    if words or at != 1:
        said = f"arguments {shlex.join(words)}" if words else f"`at` {at}"
        raise UsageError(
            f"{said} given, but {path.name} is a task file (it defines build_model), whose "
            "functions take none; leave them out, or give `script` to run the file as a script"
        )
    return TaskSource(path)


def _split(given: str | Path) -> tuple[str | Path, str | None]:
    """Split "train.py:build" into a path and a function's name; a path may hold colons itself."""
    place, separator, function = str(given).rpartition(":")
    if not separator or Path(given).expanduser().exists() or not place.endswith(".py"):
        return given, None
    if not function.isidentifier():
        raise UsageError(
            f"{str(given)!r} given, expected a function's name after the colon: train.py:build"
        )
    return place, function


def _is_task_file(path: Path) -> bool:
    """Say whether a file is meant as a task file: both functions are its own, or it trains nothing.

    One whose build_data takes no batch size, and that trains, is a script.
    """
    own, imported = _bound_names(path, set())
    found = [_similar(wanted, own) for wanted in _OF_A_TASK_FILE]
    if not any((*found, *(_similar(each, imported) for each in _OF_A_TASK_FILE))):
        return False
    tree = parsed(path)
    nodes = () if tree is None else nodes_of(tree)
    if all(found) and not any(map(_takes_no_batch, nodes)):
        return True
    called = {ast.unparse(each.func) for each in nodes if isinstance(each, ast.Call)}
    return not {name.rpartition(".")[2] for name in called} & _TRAINING_CALLS


def _takes_no_batch(node: ast.AST) -> bool:
    """Say whether code defines a build_data that no batch size can be given to."""
    if not isinstance(node, ast.FunctionDef) or node.name != "build_data":
        return False
    given = node.args
    return not (given.posonlyargs or given.args or given.vararg)


def _similar(wanted: str, names: set[str]) -> bool:
    return bool(difflib.get_close_matches(wanted, names, n=1, cutoff=_SIMILARITY_CUTOFF))


def _bound_names(path: Path, seen: set[Path]) -> tuple[set[str], set[str]]:
    """Return the names that a file binds outside its functions: its own, and imported ones."""
    tree = None if path in seen else parsed(path)
    seen.add(path)
    own: set[str] = set()
    imported: set[str] = set()
    waiting: list[ast.AST] = [] if tree is None else list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            folder = path.parents[max(node.level - 1, 0)]
            file = module_file(folder, node.module or "")
            imported |= set() if file is None else set().union(*_bound_names(file, seen))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            imported |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            names = [each for each in nodes_of(node) if isinstance(each, ast.Name)]
            own |= {each.id for each in names if isinstance(each.ctx, ast.Store)}
        elif isinstance(node, ast.stmt | ast.ExceptHandler):
            waiting += ast.iter_child_nodes(node)
    return own, imported
