"""Draws the user's batches: seeded, from random streams of their own, again and again if asked."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Generator, Iterator
from typing import Any

from autoprec.backends.protocol import Task
from autoprec.backends.shared.held_iterators import go_through
from autoprec.backends.shared.rng_streams import Generators, RandomStream
from autoprec.errors import AutoprecError, DataError, TaskError

_AUTOPREC_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep


def draw_batches(
    task: Task,
    batch_size: int,
    *,
    generators: Generators,
    seed: Callable[[], None],
    iterate: Callable[[Any], Iterator[Any]],
    check: Callable[[Any, int], None],
    size_in_bytes: Callable[[Any], int],
    repeat: bool,
    hint: str,
) -> Generator[Any, None, None]:
    """Yield the batches of `build_data`; with `repeat` start again at their end.

    `seed` seeds all generators before `build_data`, and data are drawn from a stream of their own:
    what training consumes (dropout) does not change what the next batch is. `iterate` goes through
    the data once; data that can be gone through only once are built anew. `check` looks at a batch
    and its place since the data began. What goes through the data ends with them, with its worker
    processes, unless the user's code holds it as well. Raises `TaskError`, with the `hint`, where
    there is no batch, and `DataError` where the user's code raises.
    """
    stream = RandomStream(generators)

    def build() -> Any:
        with stream.swapped(), _users_errors(task, "build_data"):
            return task.build_data(batch_size)

    with stream.swapped():
        seed()
    data = [build()]
    ever = built_anew = False
    while True:
        passing = go_through(data, iterate, size_in_bytes)
        count = 0
        with contextlib.closing(passing):
            while True:
                with stream.swapped(), _users_errors(task, "what build_data returned"):
                    ended, batch = next(passing)
                if ended:
                    break
                check(batch, count)
                count += 1
                yield batch
        ever = ever or count > 0
        if count == 0 and (built_anew or not ever):
            raise _no_batches(task, batch_size, hint, ever=ever)
        if not repeat:
            return
        built_anew = count == 0 or not data  # it ended, or was an iterator
        if built_anew:
            data[:] = [build()]


def _no_batches(task: Task, batch_size: int, hint: str, *, ever: bool) -> TaskError:
    called = f"{task.name}: build_data({batch_size})"
    if ever:
        return TaskError(
            f"{called} yielded batches at first and none when it was called again: what it returns "
            "has ended and does not begin again. Return a list, a DataLoader or a data set, or "
            "make a new iterator in every call"
        )
    return TaskError(
        f"{called} yielded no batches; expected at least one. {hint} Or did it return an iterator "
        "that has ended? Then make a new one in every call"
    )


@contextlib.contextmanager
def _users_errors(task: Task, where: str) -> Iterator[None]:
    """Raise `DataError` for what the user's code raises here: no recipe has a part in it."""
    try:
        yield
    except (AutoprecError, MemoryError):
        raise
    except Exception as error:
        raise DataError(
            f"{task.name}: {where} raised {_described(error)}{_defined_at(task.build_data)}"
        ) from error


def _described(error: Exception) -> str:
    """Return an exception in a line; of a loader's worker process, what was raised there."""
    kind, lines = type(error).__name__, str(error).strip().splitlines()
    remote = any("Traceback (most recent call last)" in line for line in lines)
    said = (lines[-1] if remote else lines[0]).removeprefix(f"{kind}: ") if lines else ""
    return f"{kind}: {said}" if said else kind


def _defined_at(function: Any) -> str:
    """Say where a function is defined, for errors that are raised in nothing of the user's."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None or code.co_filename.startswith(_AUTOPREC_FOLDER):  # of what was captured
        return ""
    return f" (build_data is at line {code.co_firstlineno} of {os.path.basename(code.co_filename)})"
