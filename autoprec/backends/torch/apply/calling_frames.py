"""Looks at the variables of the code that calls ours, and keeps none of them alive."""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_LIBRARIES = (
    "site-packages",
    "dist-packages",
    f"{Path(__file__).parents[3]}{os.sep}",
    f"{sysconfig.get_path('stdlib')}{os.sep}",
)


def local_variables(frame: types.FrameType) -> dict[str, Any]:
    """Return a frame's variables.

    Until Python 3.13 a function's frame keeps the dict that it shows, and with it all that was in
    its variables then, until it ends: that one is cleared.
    """
    shown = frame.f_locals
    found = dict(shown)
    if isinstance(shown, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        shown.clear()
    return found


def variables_in_sight() -> Iterator[Mapping[str, Any]]:
    """Yield the variables at hand where a loop calls: of its file, its function and its `self`.

    The loop is the nearest function that is neither a library's nor ours.
    """
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return
    local = local_variables(frame)
    yield frame.f_globals
    yield local
    yield getattr(local.get("self"), "__dict__", {})


def is_library(filename: str) -> bool:
    """Say whether a file of code is an installed package's, Python's or ours."""
    return any(each in filename for each in _LIBRARIES)
