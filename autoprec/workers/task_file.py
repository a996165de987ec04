"""Reads the user's task file: a plain Python module that imports nothing of autoprec.

`load_task` runs in a worker process only: the task file is code, and it runs as the user. The
parent only hashes it (see task_digest.py) without running anything.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import inspect
import math
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from autoprec.backends import registry
from autoprec.backends.protocol import Task
from autoprec.core.codec import did_you_mean
from autoprec.core.dtypes import Policy
from autoprec.errors import ProfileError, TaskError, UsageError, UserCodeError

_AUTOPREC_FOLDER = str(Path(__file__).parents[1]) + os.sep
_MAX_LINE_CHARACTERS = 200
_OPTIONAL_FUNCTIONS = ("loss_fn", "training_step", "build_optimizer", "evaluate", "count_samples")


def check_task_path(path: str | Path) -> Path:
    """Return a task file's absolute path, checked before anything runs or is written.

    `UsageError` if it is not a readable Python file, `TaskError` if it is not valid Python.
    """
    file = Path(path).expanduser()
    if not file.exists():
        raise UsageError(
            f"there is no task file {str(path)!r}; give the path of a Python file that defines "
            "build_model and build_data (see `autoprec tune --help`)"
        )
    if not file.is_file() or file.suffix != ".py":
        raise UsageError(f"{str(path)!r} is not a Python file; a task file ends in .py")
    try:
        ast.parse(file.read_bytes(), filename=str(file))
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be read: {error.strerror or error}") from error
    except SyntaxError as error:
        raise TaskError(describe_syntax_error(file, error)) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise TaskError(f"{file.name} is not Python source: {error}") from error
    return file.resolve()


_BASELINE = "BASELINE"


def present_policy(path: Path) -> Policy | None:
    """Return what a task's training runs in today: its BASELINE; None without one.

    It is read without running the file, so that it may change while the task's trials hold. Raises
    `TaskError` for one that names no policy.
    """
    found = None
    for node in ast.parse(path.read_bytes()).body:
        if baseline_of(node) is not None:
            found = baseline_of(node)
    if found is None:
        return None
    if not isinstance(found, ast.Constant) or not isinstance(found.value, str):
        raise _wrong_baseline(path, f"{_BASELINE} = {ast.unparse(found)} given")
    try:
        return Policy.parse(found.value)
    except UsageError as error:
        raise _wrong_baseline(path, f"{_BASELINE}: {error}") from error


def baseline_of(node: ast.stmt) -> ast.expr | None:
    """Return the value that a statement gives to BASELINE; None for any other statement."""
    if not isinstance(node, ast.Assign | ast.AnnAssign):
        return None
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    named = [each.id for each in targets if isinstance(each, ast.Name)]
    return node.value if named == [_BASELINE] else None


def _wrong_baseline(path: Path, what: str) -> TaskError:
    return TaskError(
        f"{path.name}: {what}; expected a policy's name as text, on a line of its own at the top "
        f'level, such as {_BASELINE} = "mixed_bfloat16". If it is something else, rename it'
    )


def load_task(path: Path) -> Task:
    """Run the task file and check what it defines.

    Its folder goes on sys.path and the module is registered under its stem, so that imports from
    its folder and pickling work. Raises `TaskError`, or `UserCodeError` if the file's code raises.
    """
    module = run_file(path)
    required = {
        name: _defined_function(module, path, name) for name in ("build_model", "build_data")
    }
    for name, function in required.items():
        if function is None:
            raise TaskError(
                f"{path.name} defines no function {name}; expected "
                + ("build_model() -> model" if name == "build_model" else _BUILD_DATA)
                + did_you_mean(name, [n for n, value in vars(module).items() if callable(value)])
            )
    _reject_near_misses(module, path)
    if hasattr(module, _BASELINE) and present_policy(path) is None:
        raise _wrong_baseline(path, f"{_BASELINE} is not assigned where the file shows it")
    optional = {name: _defined_function(module, path, name) for name in _OPTIONAL_FUNCTIONS}
    for name, function in (required | optional).items():
        _check_signature(path, name, function)
    return Task(
        name=path.name,
        build_model=required["build_model"],
        build_data=required["build_data"],
        batch_size=_positive_number(module, path, "BATCH_SIZE", int),
        clip_grad_norm=_positive_number(module, path, "CLIP_GRAD_NORM", float),
        **optional,
    )


_BUILD_DATA = "build_data(batch_size) -> an iterable of (inputs, targets)"
_SIGNATURES = {
    "build_model": "build_model() -> model",
    "build_data": _BUILD_DATA,
    "loss_fn": "loss_fn(outputs, targets) -> scalar",
    "training_step": "training_step(model, batch) -> loss",
    "build_optimizer": "build_optimizer(model) -> optimizer",
    "evaluate": "evaluate(model) -> float",
    "count_samples": "count_samples(batch) -> int",
}


def _check_signature(path: Path, name: str, function: Any) -> None:
    """Raise `TaskError` now, not mid-run, where a function cannot be called as it will be."""
    if function is None:
        return
    inside = _SIGNATURES[name].partition("(")[2].partition(")")[0]
    arguments = [each for each in inside.split(", ") if each]
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise TaskError(
            f"{path.name}: {name} cannot be called as {_SIGNATURES[name]}: {error}"
        ) from error
    except ValueError:  # a function of C has no signature to look at
        return


#: From this similarity to an optional name on, another name is taken for a typo (difflib's ratio).
_SIMILARITY_CUTOFF = 0.85


def _reject_near_misses(module: ModuleType, path: Path) -> None:
    """Raise `TaskError` for a name so close to an optional one that it must be a typo."""
    settings = ("BATCH_SIZE", "CLIP_GRAD_NORM", _BASELINE)
    for name, value in vars(module).items():
        if name.startswith("_"):
            continue
        if not callable(value) and not isinstance(value, ModuleType):
            wanted = _similar_undefined_name(name.upper(), settings, module)
        elif getattr(value, "__module__", "") == module.__name__:
            wanted = _similar_undefined_name(name, _OPTIONAL_FUNCTIONS, module)
            wanted = wanted if wanted and _can_be_called_as(wanted, value) else ""
        else:
            wanted = ""
        if wanted:
            shown = f" = {value!r}"[:60] if not callable(value) else "()"
            raise TaskError(
                f"{path.name}: {name}{shown} is not read; did you mean {wanted}? Rename it so, or, "
                "if it is something else, to a name that is less like it"
            )


def _similar_undefined_name(name: str, wanted: Sequence[str], module: ModuleType) -> str:
    """Return the most similar of the undefined `wanted` names; "" if none is similar."""
    missing = [each for each in wanted if not hasattr(module, each)]
    return next(iter(difflib.get_close_matches(name, missing, n=1, cutoff=_SIMILARITY_CUTOFF)), "")


def _can_be_called_as(name: str, function: Any) -> bool:
    """Return whether a function accepts the arguments of the one called `name`."""
    try:
        _check_signature(Path(), name, function)
    except TaskError:
        return False
    return True


def run_file(path: Path, arguments: Sequence[str] = ()) -> ModuleType:
    """Run a file as a module, with the arguments in sys.argv; raises as `load_task` does."""
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
    sys.argv = [str(path), *arguments]
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise TaskError(describe_syntax_error(path, error)) from error
    except SystemExit as error:
        raise TaskError(
            f"{path.name} called sys.exit({error.code!r}) while it was imported; here it only "
            "defines functions: put what runs under `if __name__ == '__main__':`"
        ) from error
    except KeyboardInterrupt:
        raise
    except ProfileError as error:
        raise UserCodeError(
            f"{path.name} reads a profile while it is imported: {error}. A tuning must not depend "
            "on the profile that it makes: give what the task needs of it, such as its batch, as a "
            "number",
            user_frames(error),
        ) from error
    except BaseException as error:
        raise UserCodeError(
            f"{path.name} raised {type(error).__name__} while it was imported: {error}",
            user_frames(error),
        ) from error
    return module


def describe_syntax_error(path: Path, error: SyntaxError) -> str:
    """Return file, line and text of what is no Python."""
    place = Path(error.filename).name if error.filename else path.name
    line = (error.text or "").strip()
    line = line if len(line) <= _MAX_LINE_CHARACTERS else line[:_MAX_LINE_CHARACTERS] + "..."
    shown = f": {line}" if line else ""
    return f"{place}, line {error.lineno}: {error.msg}{shown}"


def _defined_function(module: ModuleType, path: Path, name: str) -> Any:
    value = getattr(module, name, None)
    if value is not None and not callable(value):
        raise TaskError(
            f"{path.name}: {name} is a {type(value).__name__}, expected a function; "
            f"define it with `def {name}(...)`"
        )
    return value


def _positive_number(module: ModuleType, path: Path, name: str, kind: type) -> Any:
    value = getattr(module, name, None)
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    whole = kind is float or isinstance(value, int)
    if not number or not whole or not 0 < value < math.inf:
        raise TaskError(
            f"{path.name}: {name} = {value!r}, expected a positive "
            f"{'integer' if kind is int else 'number'}"
        )
    return kind(value)


def user_frames(error: BaseException) -> str:
    """Format the traceback of `error` without frames that the user cannot change.

    Left out are autoprec's own frames, the import machinery's, and those of a framework, except the
    last, which names the function that complained.
    """
    lines: list[str] = []
    framework = _framework_files()
    for part in _exception_chain(error):
        stack = traceback.extract_tb(part.__traceback__)
        frames = [
            frame
            for frame in stack
            if not frame.filename.startswith((_AUTOPREC_FOLDER, "<frozen "))
            and (frame is stack[-1] or not framework.search(frame.filename))
        ]
        if frames and lines:
            lines.append("\n")
        lines += traceback.StackSummary.from_list(frames).format()
        lines += _without_frames_of(framework, _last_line(part))
    return "".join(lines)


def _without_frames_of(framework: re.Pattern[str], message: list[str]) -> list[str]:
    """Leave a framework's frames out of a traceback that a message holds, as a loader's does."""
    kept, leaving = [], False
    for line in "".join(message).splitlines(keepends=True):
        frame = re.match(r'\s+File "(.*)", line \d+', line)
        if frame is not None:
            leaving = bool(framework.search(frame[1]))
        elif not line.startswith(" "):
            leaving = False
        kept += [] if leaving else [line]
    return kept


def _framework_files() -> re.Pattern[str]:
    """Return a pattern for the paths of installed frameworks' files."""
    known = registry.all_capabilities().values()
    packages = {package.partition(".")[0] for each in known for package in each.model_modules}
    return re.compile(rf"[\\/](site|dist)-packages[\\/]({'|'.join(sorted(packages))})[\\/]")


def raised_by_autoprec(error: BaseException) -> bool:
    """Return whether a line of autoprec itself raised an exception, not something it called."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(_AUTOPREC_FOLDER)


def _last_line(error: BaseException) -> list[str]:
    try:
        return traceback.format_exception_only(error)
    except Exception:  # whatever __str__ or __notes__ of the user's exception does
        return [f"{type(error).__name__}\n"]


def _exception_chain(error: BaseException) -> list[BaseException]:
    """List the exception and its causes, the first cause first."""
    chain = [error]
    while True:
        last = chain[-1]
        cause = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if cause is None or any(cause is each for each in chain):
            return list(reversed(chain))
        chain.append(cause)
