"""Runs a training script up to its own call of `fit` or `train`, and hands that call over.

The script runs as `python train.py` would run it. Nothing after the call ever runs: who takes the
call over serves the tuning from its frame, and ends the process there. What fails on the way is
raised here where the script has ended, and handed over where it has not: no exception passes
through the script's own frames, which may catch it and go on.
"""

from __future__ import annotations

import os
import runpy
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from autoprec.backends.protocol import Task
from autoprec.errors import TaskError, UserCodeError
from autoprec.workers.task_file import describe_syntax_error, user_frames
from autoprec.workers.task_source import TaskSource
from autoprec.workers.training_calls import TRAINERS, AwaitedCall, TrainingCall

_SHOWN_BYTES = 2000
_SHOWN_LINES = 6

ServeHere = Callable[[Callable[[], Any]], NoReturn]
"""Answers the call at hand with what a function returns or raises, and goes on from its frame."""


@dataclass(frozen=True)
class ReachedCall:
    """The call at which a script waits: its place, "train.py:41", and its task.

    `said` is what it is in words, `made_by` what makes another digest: the trainer's version.
    `seconds` went by until it was reached.
    """

    said: str
    made_by: str
    seconds: float
    task: Callable[[], Task]


def run_script(
    source: TaskSource, serve_here: ServeHere, take: Callable[[ReachedCall], Any]
) -> NoReturn:
    """Run a script; at its call, serve there what `take` returns of it.

    Raises `TaskError` or `UserCodeError` where the script ends before.
    """
    began, process = time.monotonic(), os.getpid()

    def hand_over(work: Callable[[], Any]) -> NoReturn:
        awaited.end()
        if os.getpid() != process:  # of the script's: it cannot answer
            sys.stderr.write("autoprec: training began in a process that the script started\n")
            os._exit(1)
        serve_here(work)

    def reached(call: TrainingCall, given: Mapping[str, Any]) -> NoReturn:
        seconds = time.monotonic() - began
        place = _line_of_user(source.path, sys._getframe(1))
        hand_over(
            lambda: take(
                ReachedCall(
                    f"{place} {call.shown} ({call.trainer})",
                    f"{call.package} {_version(call.package)}",
                    seconds,
                    lambda: call.task_of(given, source.name),
                )
            )
        )

    def looped() -> NoReturn:
        place = _line_of_user(source.path, sys._getframe(1))
        hand_over(lambda: _raise(TaskError(f"{place} {_LOOP}. {_factory(source)}")))

    awaited = AwaitedCall(source.at, reached, looped)
    awaited.install()
    run_as_main(source)
    made = f"only {awaited.seen} of them" if awaited.seen else "none"
    calls = "a call of fit or train" if source.at == 1 else f"{source.at} calls of fit or train"
    raise TaskError(
        f"{source.name} ended without {calls} of {TRAINERS} ({made}). {_factory(source)}. A task "
        "file defines build_model and build_data"
    )


_LOOP = "makes an update in a loop of the script's own, which cannot be tuned as it stands"


def _factory(source: TaskSource) -> str:
    return (
        "Write a function that returns what it trains, (model, optimizer, loader, step) or a "
        f"trainer, and tune that: `autoprec tune {source.path.name}:build`"
    )


def _raise(error: Exception) -> NoReturn:
    raise error


def run_as_main(source: TaskSource) -> None:
    """Run the script as Python runs a script; return when it ends."""
    path = source.path
    sys.path.insert(0, str(path.parent))
    sys.argv = [str(path), *source.arguments]
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SyntaxError as error:
        if error.filename != str(path):
            raise _raised(source, error) from error
        raise TaskError(describe_syntax_error(path, error)) from error
    except SystemExit as error:
        if error.code not in (None, 0):
            raise TaskError(_exited(source, error)) from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise _raised(source, error) from error


def _raised(source: TaskSource, error: BaseException) -> UserCodeError:
    """Return what the script raised, with its own frames."""
    said = f"{source.name} raised {type(error).__name__} before it trained: {error}"
    if isinstance(error, MemoryError):
        said = (
            f"{source.name} itself needs more memory than a worker may have, before it trains: "
            "give more as `memory_bytes`"
        )
    elif isinstance(error, EOFError):
        said += ". A script that is tuned has no input"
    return UserCodeError(said, user_frames(error))


def _exited(source: TaskSource, error: SystemExit) -> str:
    """Say how a script ended itself, and the last lines it printed: there argparse says why."""
    printed = "\n".join(_printed().splitlines()[-_SHOWN_LINES:])
    shown = f"; it printed\n{printed}\n" if printed else ". "
    given = shlex.join(source.arguments) or "none"
    return (
        f"{source.name} called sys.exit({error.code!r}) before it trained{shown}Its arguments were "
        f"{given}; they follow a `--`, as in `autoprec tune {source.path.name} -- --lr 1e-3`. "
        f"{_factory(source)}"
    )


def _printed() -> str:
    """Return the last of what this process printed, where that goes to a file; else ""."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        size = os.fstat(1).st_size
        return os.pread(1, _SHOWN_BYTES, max(0, size - _SHOWN_BYTES)).decode(errors="replace")
    except (OSError, ValueError, AttributeError):
        return ""


def _line_of_user(path: Path, frame: FrameType | None) -> str:
    """Return file and line of the innermost frame that is the script's or of a file beside it."""
    folder = str(path.parent) + os.sep
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(folder) and "site-packages" not in file[len(folder) :]:
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return path.name


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
