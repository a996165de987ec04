"""Loads a task that is made of objects: what a function of the user's returns, or was sent here."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NoReturn

from autoprec.backends.capture import is_factory, task_of
from autoprec.backends.protocol import Task
from autoprec.core.codec import did_you_mean
from autoprec.errors import TaskError, UserCodeError
from autoprec.workers.sent_objects import receive
from autoprec.workers.task_file import load_task, run_file, user_frames
from autoprec.workers.task_source import TaskSource
from autoprec.workers.training_calls import AwaitedCall


class Trains(BaseException):
    """User's code trains where it should not; what catches exceptions there does not go on."""


def load_source(source: TaskSource) -> Task:
    """Load a task file, a function of a file, or objects that were sent; raises as `load_task`."""
    if source.plain:
        return load_task(source.path)
    with _without_training(source.name):
        if source.sent:
            objects = receive(source.path)
        else:
            objects = _function_of(source, run_file(source.path, source.arguments))
        given = _called(objects, source.name) if is_factory(objects) else objects
    return task_of(given, name=source.name)


@contextlib.contextmanager
def _without_training(name: str) -> Iterator[None]:
    """Refuse a training in a file that is imported, or in a function that only returns objects."""

    def trains(*_: Any) -> NoReturn:
        raise Trains(
            "it trains there. Put what trains under `if __name__ == '__main__':`, and let the "
            "function return what is trained"
        )

    awaited = AwaitedCall(1, trains, trains)
    awaited.install()
    try:
        yield
    except Trains as error:
        raise UserCodeError(f"{name} was called, and {error}", user_frames(error)) from error
    finally:
        awaited.end()


def _function_of(source: TaskSource, module: ModuleType) -> Any:
    name = source.function or ""
    function = getattr(module, name, None)
    if function is None or not callable(function):
        kind = "nothing" if function is None else f"a {type(function).__name__}"
        names = [each for each, value in vars(module).items() if callable(value)]
        raise TaskError(
            f"{source.path.name}: {name} is {kind}, expected a function that returns what is "
            f"trained{did_you_mean(name, names)}"
        )
    return function


def _called(function: Any, name: str) -> Any:
    """Return what a function returns; its own exceptions are raised on."""
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise TaskError(
            f"{name} cannot be called without arguments: {error}; give them defaults"
        ) from error
    except ValueError:  # a function of C has no signature to look at
        pass
    return function()
