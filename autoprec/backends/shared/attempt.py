"""Tries a measurement of our own, which some tasks do not tolerate.

Halving a batch or tracing a step apart is not what the user's training does; hooks are not for
torch.func, nested tensors and the like. What cannot be measured so is unknown; it is no fault of
the task, and ends nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

NO_MEMORY = "there is not enough memory for it"

#: The classes of an accelerator that is full, by name: this file imports no framework.
_FULL = ("MemoryError", "OutOfMemoryError", "ResourceExhaustedError")

#: How lines of a TensorFlow error begin that say where it was raised rather than what is wrong.
_PLACES = ("Graph execution error", "Detected at node", "Stack trace for op", "File ", "[[", "{{")


def try_to_measure(measure: Callable[[], Result]) -> tuple[Result | None, str]:
    """Return what `measure` gives, or None and why it failed: out of memory is a reason too."""
    try:
        return measure(), ""
    except Exception as error:
        why = _reason(error)
    gc.collect()  # what the failed measurement held
    return None, why


def _reason(error: Exception) -> str:
    kind = type(error).__name__
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.startswith(_PLACES)]
    what = said[0].partition(" [[")[0] if said else ""
    if isinstance(error, MemoryError) or kind in _FULL or "allocate memory" in what:
        return NO_MEMORY
    return f"{kind}: {what}" if what else kind
