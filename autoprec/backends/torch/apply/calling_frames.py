"""Looks at the variables of the code that calls ours, and keeps none of them alive."""

from __future__ import annotations

import inspect
import types
from typing import Any


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
