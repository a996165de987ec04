"""What a training that is checked while it goes on is told: what to do about a fault, how often."""

from __future__ import annotations

from typing import Literal

from autoprec.errors import UsageError

EVERY = 2000
"""The most updates between two checks, unless `watch_every` says otherwise."""

Action = Literal["warn", "float32", "raise"]
ACTIONS = ("warn", "float32", "raise")


def check_settings(watch: object, every: object) -> Action | None:
    """Return what to do about a fault, None for no watch; `UsageError` for other settings."""
    if watch is False or watch is None:
        return None
    if watch not in ACTIONS:
        raise UsageError(
            f"watch={watch!r} given, expected 'warn', 'float32', 'raise' or False (no checks "
            "during training)"
        )
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise UsageError(
            f"watch_every={every!r} given, expected the most updates between two checks: {EVERY}, "
            "or another whole number from 1"
        )
    return watch  # type: ignore[return-value]
