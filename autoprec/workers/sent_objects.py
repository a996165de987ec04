"""Sends a notebook's objects to workers, as a file of bytes that cloudpickle makes.

A function of a notebook has no file that a worker could import, so it travels by its value, with
the variables that it uses. What cannot travel is named by the way to it.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import io
import os
import pickle
import shutil
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from autoprec.backends.capture import is_factory, reduced
from autoprec.errors import TaskError, UsageError
from autoprec.workers.task_source import SENT

MOST_BYTES = 2 * 2**30
"""More than this is data that should be read by the worker."""

_DEEPEST = 12


@contextlib.contextmanager
def sent(objects: Any, folder: Path | None) -> Iterator[Path]:
    """Write objects to a file below `folder` (None: a temporary one) while the context is open.

    The file's name is theirs, its place is said by their content; tunings of the same objects share
    it, and the last of them deletes it. Raises `UsageError` for what cannot travel.
    """
    name = name_of(objects)
    content = _dumped(name, objects)
    if folder is None:
        place = Path(tempfile.mkdtemp(prefix="autoprec-"))
    else:
        place = folder / "objects" / hashlib.sha256(content).hexdigest()[:12]
    path = place / f"{name}{SENT}"
    handle = _held(path, content)
    try:
        yield path
    finally:
        if _locked(handle, alone=True):
            shutil.rmtree(place, ignore_errors=True)
        os.close(handle)


def _held(path: Path, content: bytes) -> int:
    """Write a file unless it is there; return a descriptor that keeps others from deleting it."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with contextlib.suppress(FileNotFoundError):  # where another tuning has just deleted it
            handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)
            if _locked(handle, alone=True):
                _write(handle, path, content)
            _locked(handle, alone=False)
            if os.path.samestat(path.stat(), os.fstat(handle)):
                return handle


def _write(handle: int, path: Path, content: bytes) -> None:
    """Write what a file should hold, unless it does; leave none behind that was not written."""
    try:
        with open(handle, "r+b", closefd=False) as file:
            if file.read() != content:
                file.seek(0)
                file.truncate()
                file.write(content)
    except BaseException:
        shutil.rmtree(path.parent, ignore_errors=True)
        raise


def _locked(handle: int, *, alone: bool) -> bool:
    """Lock a file, with others who use it or `alone`; say whether it is locked so.

    Others are waited for only while they write.
    """
    if os.name != "posix":
        return True
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB if alone else fcntl.LOCK_SH)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True


def receive(path: Path) -> Any:
    """Return the objects of such a file; they are code, which runs here."""
    with path.open("rb") as file:
        try:
            for folder in pickle.load(file):  # noqa: S301
                if folder not in sys.path:
                    sys.path.append(folder)
            return pickle.load(file)  # noqa: S301
        except (AttributeError, ImportError) as error:
            raise TaskError(
                f"{path.stem} came from another process and cannot be read here: "
                f"{type(error).__name__}: {error}"
            ) from error


def name_of(objects: Any) -> str:
    """Return what a task of objects is called: by the function, else by the model's class."""
    if is_factory(objects):
        return str(getattr(objects, "__name__", "task")).strip("<>")
    given = list(objects.values()) if isinstance(objects, Mapping) else objects
    if isinstance(given, list | tuple) and given:
        trainer = type(given[0]).__name__ == "Trainer" and len(given) > 1
        return type(given[1 if trainer else 0]).__name__.lower()
    return type(getattr(objects, "model", objects)).__name__.lower()


class _OnDevice(Exception):
    """A tensor is not in main memory."""


def _dumped(name: str, objects: Any) -> bytes:
    content = _bytes_of([path for path in sys.path if path]) + _tried(name, objects)
    if len(content) > MOST_BYTES:
        raise UsageError(
            f"{name} takes {len(content) / 2**30:.1f} GiB, and at most {MOST_BYTES / 2**30:g} GiB "
            "travel to the workers: give a function that builds it and reads the data"
        )
    return content


def _tried(name: str, objects: Any) -> bytes:
    try:
        return _bytes_of(objects)
    except UsageError:
        raise
    except Exception as error:
        where, value, why = _innermost(name, objects, error)
        raise UsageError(
            f"{name} cannot travel to the workers: {where} is a {type(value).__name__} "
            f"({type(why).__name__}: {why}). {_way_out(why, where)}"
        ) from error


def _way_out(why: Exception, where: str) -> str:
    if isinstance(why, _OnDevice):
        return "Move it to the CPU, as model.cpu() does, or build it inside a function"
    return (
        f"Give a function that makes {where} itself: def build(): return model, optimizer, "
        "loader, step"
    )


def _bytes_of(objects: Any) -> bytes:
    buffer = io.BytesIO()
    _pickler_class()(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(objects)
    return buffer.getvalue()


def _pickler_class() -> Any:
    try:
        import cloudpickle
    except ImportError as error:
        raise UsageError(
            "objects of a notebook travel to the workers by cloudpickle, which is not installed; "
            "install it with `pip install 'autoprec[notebook]'`, or put the function into a file: "
            "autoprec.tune('train.py:build')"
        ) from error

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc, unused-ignore]
        """Refuses what is in a device's memory: the workers see another device, or none.

        What a framework would not send whole is sent with the rest.
        """

        def reducer_override(self, obj: Any) -> Any:
            device = getattr(obj, "device", None) if hasattr(obj, "requires_grad") else None
            if getattr(device, "type", "cpu") not in ("cpu", "meta"):
                raise _OnDevice(f"it is on {device}")
            return reduced(obj) or super().reducer_override(obj)

    return Pickler


def _innermost(name: str, value: Any, error: Exception) -> tuple[str, Any, Exception]:
    """Return the innermost part that cannot travel, the way to it, and why it cannot."""
    for _ in range(_DEEPEST):
        for path, part in _parts(name, value):
            try:
                _bytes_of(part)
            except Exception as found:
                name, value, error = path, part, found
                break
        else:
            break
    return name, value, error


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object holds, each with the way to it."""
    if isinstance(value, types.MethodType):
        yield f"{name}.__self__", value.__self__
    elif isinstance(value, types.FunctionType):
        with contextlib.suppress(TypeError, ValueError):
            seen = inspect.getclosurevars(value)
            yield from ({**seen.nonlocals, **seen.globals}).items()
    elif isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"{name}[{place}]", item) for place, item in enumerate(value))
    else:
        state = value.__getstate__() if hasattr(value, "__getstate__") else None
        held = state if isinstance(state, dict) else getattr(value, "__dict__", {})
        for key, item in held.items():
            if key in ("_modules", "_parameters", "_buffers") and isinstance(item, Mapping):
                yield from ((f"{name}.{path}", part) for path, part in item.items())
            else:
                yield f"{name}.{key}", item
