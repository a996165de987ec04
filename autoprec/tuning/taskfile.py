"""Reads the user's task file: a plain Python module that imports nothing of autoprec.

`load_task` runs in a worker process only: the task file is code, and it runs as the user. The
parent only hashes it (`task_digest`) without running anything.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from autoprec.backends.base import Task
from autoprec.errors import TaskError, UsageError, UserCodeError

_PACKAGE = str(Path(__file__).parents[1])
_FUNCTIONS = ("loss_fn", "training_step", "build_optimizer", "evaluate")


def check_task_path(path: str | Path) -> Path:
    """The absolute path of a task file; `UsageError` if it is not a readable Python file."""
    file = Path(path).expanduser()
    if not file.exists():
        raise UsageError(
            f"there is no task file {str(path)!r}; give the path of a Python file that defines "
            "build_model and build_data (see `autoprec tune --help`)"
        )
    if file.is_dir() or file.suffix != ".py":
        raise UsageError(f"{str(path)!r} is not a Python file; a task file ends in .py")
    return file.resolve()


def task_digest(path: Path) -> str:
    """A SHA-256 over the task file and every module it imports from its own folder."""
    digest = hashlib.sha256()
    for file in _local_files(path):
        digest.update(file.relative_to(path.parent).as_posix().encode() + b"\0")
        digest.update(file.read_bytes() + b"\0")
    return digest.hexdigest()


def _local_files(path: Path) -> list[Path]:
    found: dict[Path, None] = {}
    waiting = [path]
    while waiting:
        file = waiting.pop()
        if file in found:
            continue
        found[file] = None
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError, OSError):
            continue
        for name in _imported_names(tree):
            waiting += _files_of(path.parent, name)
    return [path, *sorted(file for file in found if file != path)]


def _imported_names(tree: ast.AST) -> list[str]:
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            names += [base, *(f"{base}.{alias.name}".lstrip(".") for alias in node.names)]
    return [name for name in names if name]


def _files_of(folder: Path, name: str) -> list[Path]:
    """The files of `folder` that importing `name` runs."""
    found = []
    place = folder
    for part in name.split("."):
        place = place / part
        found += [place.with_suffix(".py"), place / "__init__.py"]
    return [file.resolve() for file in found if file.is_file()]


def load_task(path: Path) -> Task:
    """Run the task file and check what it defines.

    Its folder goes on sys.path and the module is registered under its stem, so that imports beside
    it and pickling work. Raises `TaskError`, or `UserCodeError` if the file's own code raises.
    """
    module = _run(path)
    required = {name: _function(module, path, name) for name in ("build_model", "build_data")}
    for name, function in required.items():
        if function is None:
            raise TaskError(
                f"{path.name} defines no function {name}; expected "
                + ("build_model() -> model" if name == "build_model" else _BUILD_DATA)
            )
    optional = {name: _function(module, path, name) for name in _FUNCTIONS}
    return Task(
        name=path.name,
        build_model=required["build_model"],
        build_data=required["build_data"],
        batch_size=_positive(module, path, "BATCH_SIZE", int),
        clip_grad_norm=_positive(module, path, "CLIP_GRAD_NORM", float),
        **optional,
    )


_BUILD_DATA = "build_data(batch_size) -> an iterable of (inputs, targets)"


def _run(path: Path) -> ModuleType:
    folder, name = str(path.parent), path.stem
    if name in sys.modules or name in sys.stdlib_module_names:
        raise TaskError(
            f"{path.name}: a module named {name!r} exists already; rename the task file"
        )
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TaskError(f"{path.name} cannot be loaded as a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, folder)
    sys.modules[name] = module
    sys.argv = [str(path)]
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise TaskError(_syntax(path, error)) from error
    except SystemExit as error:
        raise TaskError(
            f"{path.name} called sys.exit({error.code!r}) while it was imported; a task file only "
            "defines functions: put what runs under `if __name__ == '__main__':`"
        ) from error
    except Exception as error:
        raise UserCodeError(
            f"{path.name} raised {type(error).__name__} while it was imported: {error}",
            user_frames(error),
        ) from error
    return module


def _syntax(path: Path, error: SyntaxError) -> str:
    place = Path(error.filename).name if error.filename else path.name
    line = (error.text or "").strip()
    shown = f": {line}" if line else ""
    return f"{place}, line {error.lineno}: {error.msg}{shown}"


def _function(module: ModuleType, path: Path, name: str) -> Any:
    value = getattr(module, name, None)
    if value is not None and not callable(value):
        raise TaskError(
            f"{path.name}: {name} is a {type(value).__name__}, expected a function; "
            f"define it with `def {name}(...)`"
        )
    return value


def _positive(module: ModuleType, path: Path, name: str, kind: type) -> Any:
    value = getattr(module, name, None)
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or value <= 0 or (kind is int and not isinstance(value, int)):
        raise TaskError(
            f"{path.name}: {name} = {value!r}, expected a positive "
            f"{'integer' if kind is int else 'number'}"
        )
    return kind(value)


def user_frames(error: BaseException) -> str:
    """The traceback of `error` without autoprec's own frames and the import machinery's."""
    lines: list[str] = []
    for part in _chain(error):
        frames = [
            frame
            for frame in traceback.extract_tb(_traceback(part))
            if not frame.filename.startswith(_PACKAGE) and "importlib" not in frame.filename
        ]
        lines += traceback.format_list(frames)
        lines += traceback.format_exception_only(part)
    return "".join(lines)


def _chain(error: BaseException) -> list[BaseException]:
    chain = [error]
    while (cause := chain[-1].__cause__) is not None and cause not in chain:
        chain.append(cause)
    return list(reversed(chain))


def _traceback(error: BaseException) -> TracebackType | None:
    return error.__traceback__
