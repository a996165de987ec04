"""Describes what a recipe changed, in plain values to print, log or put into a profile."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PaddedModule:
    """A module whose products are padded: each dimension's size before and after."""

    path: str
    kind: str
    sizes: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class Skipped:
    """Something in a recipe that could not be applied, and why."""

    path: str
    what: str
    reason: str


@dataclass(frozen=True)
class ChangeReport:
    """What applying a recipe changed.

    `islands` are the modules whose own code runs in float32 because the recipe says so, `outputs`
    those that do because they end the model (last activation, loss); the root's path is "".
    `float8` are the layers that multiply in float8, `globals_set` the settings of the whole process
    that were written.
    """

    islands: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    padded: tuple[PaddedModule, ...] = ()
    float8: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    warnings: tuple[str, ...] = ()
    memory_format: str = "contiguous"
    compiled: bool = False
    globals_set: tuple[str, ...] = ()
