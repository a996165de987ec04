"""Lets every build of a task's model start with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class InitialStates:
    """The state that the first build with each seed had, for every later build to start from."""

    def __init__(self) -> None:
        self._states: dict[int, Any] = {}

    def start_alike(
        self, seed: int, take_state: Callable[[], Any], put_back: Callable[[Any], None]
    ) -> None:
        """Put back the first build's state, or keep this one's if it is the first."""
        if seed in self._states:
            put_back(self._states[seed])
        else:
            self._states[seed] = take_state()
