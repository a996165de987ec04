"""Whether this process is a worker of a tuning, in which profiles are not applied.

The user's own code may apply its profile where it builds the model. While a recipe is measured it
is the tuning that applies one, so there it changes nothing, and that is noted.
"""

from __future__ import annotations

import os

WORKER = "AUTOPREC_WORKER"
"""Set in the environment of workers and of what they start."""

_NOTES: dict[str, None] = {}


def in_worker() -> bool:
    """Say whether a tuning or a verification started this process."""
    return bool(os.environ.get(WORKER))


def note(text: str) -> None:
    """Note once what the user is told when the task is loaded."""
    _NOTES[text] = None


def notes() -> tuple[str, ...]:
    """Return what was noted so far."""
    return tuple(_NOTES)
