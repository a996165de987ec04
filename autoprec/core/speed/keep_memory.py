"""Decides whether the search runs with freed memory kept, at the baseline before anything else.

The knob works on every recipe, hardly ever for the worse, the more the larger the tensors are, and
a process cannot undo it. So it is not a factor of the search: where the baseline runs with it, all
other recipes are measured with it, for two trials are too rough to say more. What it is worth at
the chosen recipe is measured in the confirmation, unless the baseline or the recipe's batch make
that plain.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from autoprec.core.number_words import times
from autoprec.core.recipe import KEEP_MEMORY
from autoprec.core.speed.space import BATCH, Point, Space, point_key

#: Above this ratio of the baseline's two trials it is plain that the knob pays.
_CLEARLY_FASTER_RATIO = 1.15

#: At this many times the baseline's batch, tensors are so much larger that the knob pays: on all
#: recorded grids (benchmarks/curves/) whose fastest recipe is that large, it gains 5 to 274 %.
_MUCH_LARGER_FACTOR = 4


class MeasuredPoint(Protocol):
    """The part of an outcome that is needed here."""

    @property
    def point(self) -> Point:
        """Return the measured point."""

    @property
    def rate(self) -> float:
        """Return samples per second, 0 where it failed."""


def start_point(space: Space, baseline: Point, history: Sequence[MeasuredPoint]) -> Point:
    """Return the baseline as all further recipes are measured: with its memory kept or without."""
    keeping = {**baseline, KEEP_MEMORY: True}
    if True not in space.knobs.get(KEEP_MEMORY, ()) or keeping == baseline:
        return baseline
    kept, plain = _rate(keeping, history), _rate(baseline, history)
    if kept is None or plain is None:
        return keeping
    return keeping if kept > 0 else baseline


def clearly_pays(
    space: Space, baseline: Point, history: Sequence[MeasuredPoint], batch_size: int
) -> bool:
    """Return whether keeping memory is plainly worth its cost at a batch."""
    if batch_size >= _MUCH_LARGER_FACTOR * int(baseline[BATCH]):
        return True
    start = start_point(space, baseline, history)
    kept, plain = _rate(start, history), _rate(baseline, history)
    return bool(kept and plain and kept > _CLEARLY_FASTER_RATIO * plain)


def describe_gain(baseline: Point, history: Sequence[MeasuredPoint]) -> str:
    """Describe what the baseline gains with its memory kept; empty where it did not run."""
    kept, plain = _rate({**baseline, KEEP_MEMORY: True}, history), _rate(baseline, history)
    if not kept or not plain:
        return ""
    said = "all further trials keep the memory that a step frees (keep_memory)"
    ratio = times(kept / plain)
    if kept > _CLEARLY_FASTER_RATIO * plain:
        return f"{said}: with it, the baseline ran at {ratio} its speed"
    return (
        f"{said}, as it pays at larger batches; the baseline's {ratio}, of one short trial each, "
        "decides nothing: whether the chosen recipe keeps it is measured at the end"
    )


def _rate(point: Point, history: Sequence[MeasuredPoint]) -> float | None:
    return next((ran.rate for ran in history if point_key(ran.point) == point_key(point)), None)
