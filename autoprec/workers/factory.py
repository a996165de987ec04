"""Loads a task that is made of objects: what a function of the user's returns, or was sent here."""

from __future__ import annotations

import inspect
from typing import Any

from autoprec.backends.capture import is_factory, task_of
from autoprec.backends.protocol import Task
from autoprec.core.codec import did_you_mean
from autoprec.errors import TaskError
from autoprec.workers.sent_objects import receive
from autoprec.workers.task_file import load_task, run_file
from autoprec.workers.task_source import TaskSource


def load_source(source: TaskSource) -> Task:
    """Load a task file, a function of a file, or objects that were sent; raises as `load_task`."""
    if source.sent:
        return _made_of(receive(source.path), source.name)
    if source.function is None:
        return load_task(source.path)
    module = run_file(source.path, source.arguments)
    function = getattr(module, source.function, None)
    if function is None or not callable(function):
        kind = "nothing" if function is None else f"a {type(function).__name__}"
        names = [name for name, value in vars(module).items() if callable(value)]
        raise TaskError(
            f"{source.path.name}: {source.function} is {kind}, expected a function that returns "
            f"what is trained{did_you_mean(source.function, names)}"
        )
    return _made_of(function, source.name)


def _made_of(objects: Any, name: str) -> Task:
    """Make a task of objects, or of what a function returns; its own exceptions are raised on."""
    if not is_factory(objects):
        return task_of(objects, name=name)
    try:
        inspect.signature(objects).bind()
    except TypeError as error:
        raise TaskError(
            f"{name} cannot be called without arguments: {error}; give them defaults"
        ) from error
    except ValueError:  # a function of C has no signature to look at
        pass
    return task_of(objects(), name=name)
