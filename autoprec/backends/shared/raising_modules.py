"""Notes on an exception which of a model's modules were running when it was raised.

A traceback holds the object of every method that was running, so nothing has to be watched while a
step runs well. The note is an attribute of the exception, which is raised on as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from types import FrameType

_ATTRIBUTE = "autoprec_raised_in"


def note_modules(error: BaseException, paths: Mapping[int, str]) -> None:
    """Note on `error` the paths of the modules it was raised in; `paths` are by the modules' ids.

    An exception that takes no attributes stays without a note.
    """
    running = [paths[each] for each in _running_objects(error) if each in paths]
    found = tuple(dict.fromkeys(reversed(running)))
    try:
        setattr(error, _ATTRIBUTE, found)
    except (AttributeError, TypeError):
        return


def modules_raised_in(error: BaseException) -> tuple[str, ...]:
    """Return the noted paths, innermost first; none where nothing was noted."""
    found: tuple[str, ...] = getattr(error, _ATTRIBUTE, ())
    return found


def _running_objects(error: BaseException) -> Iterator[int]:
    """Yield the ids of the methods' objects in a traceback, outermost first.

    A framework may raise an exception of its own in place of the first one (TensorFlow does where
    it traces a function): what led to it holds the innermost calls.
    """
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and all(current is not each for each in chain):
        chain.append(current)
        current = current.__cause__ or current.__context__
    for each in chain:
        trace = each.__traceback__
        while trace is not None:
            running = _object_of(trace.tb_frame)
            if running is not None:
                yield id(running)
            trace = trace.tb_next


def _object_of(frame: FrameType) -> object:
    """Return the object whose method a frame runs; None for a function's.

    A method is known by its `self`, or by being what the class of its first argument has by its
    name: a function of a model is no method of it.
    """
    code = frame.f_code
    if "self" in frame.f_locals or not code.co_argcount:
        return frame.f_locals.get("self")
    first = frame.f_locals.get(code.co_varnames[0])
    method = getattr(type(first), code.co_name, None)
    own = inspect.unwrap(method) if callable(method) else None
    return first if getattr(own, "__code__", None) is code else None
