"""How many steps a proof takes: a ladder, chosen once by what a float32 step costs.

Nothing else of a proof depends on a clock. The float32 run climbs the ladder for as long as its
loss still falls, which its losses alone decide; so a verdict is the same on a busy machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoprec.core.numerics.tolerance import mean

RUNGS = (8, 30, 120, 480)
"""The most steps of a proof; they are so far apart that the luck of a timing seldom matters."""

SHORT = 30
"""Every proof that may be this long is, and the tests for its early steps are made for it."""

FIRST = 2 * SHORT
"""How far float32 is followed before a candidate has passed its first steps."""

AVERAGED = 32
"""Further batches over which a loss at the same weights is averaged after the first steps.

An error that stays is a few per cent of a loss by then, and how one batch falls out is as much.
"""

MARKS = (0, 2, 8, 29, 59, 119, 239, 479)
"""The steps at which the float32 run's weights are kept for a comparison."""

STILL_FALLS = 0.35
"""The float32 loss is worth following while it falls by this share when its steps double."""

SECONDS = 60.0
"""What a proof may cost at most by the pace of a float32 step, unless told otherwise."""

PATIENCE = 3.0
"""How many times that `SHORT` steps may cost: fewer show little."""

_PASSES = 4
"""Runs of the first `SHORT` steps beside the two long ones."""


def rung(pace: float, seconds: float = SECONDS) -> int:
    """The most steps whose proof takes no longer than `seconds` where a step takes `pace`.

    Below `SHORT` only where that would take `PATIENCE` times as long.
    """
    affordable = [steps for steps in RUNGS if cost(steps) * pace <= seconds]
    patient = [SHORT] if cost(SHORT) * pace <= PATIENCE * seconds else []
    return max([*affordable, *patient], default=RUNGS[0])


def cost(steps: int) -> int:
    """What a proof of so many steps costs at most, in float32 steps.

    Beyond `FIRST` both runs, and what is compared at their marks, begin once more. A forward pass
    alone counts as a third of a step.
    """
    both = 2 * steps + 5 * len(marks(steps)) + sum(2 * averaged(s) // 3 for s in marks(steps))
    again = 2 * FIRST + 5 * len(marks(FIRST)) if steps > FIRST else 0
    return both + again + _PASSES * min(steps, SHORT)


def marks(steps: int) -> tuple[int, ...]:
    """The steps of a run at which its weights are kept: the usual ones, and its last."""
    within = [step for step in MARKS if step < steps]
    return tuple(dict.fromkeys([*within, steps - 1]))


def averaged(step: int) -> int:
    """Over how many further batches the loss at the mark `step` is averaged."""
    return AVERAGED if step >= FIRST else 0


def landings(steps: int) -> tuple[int, ...]:
    """Where a run of at most `steps` may end: at `FIRST`, two, four ... times that, or its end."""
    doubled = [FIRST]
    while doubled[-1] < steps:
        doubled.append(2 * doubled[-1])
    return tuple(sorted({min(steps, landing) for landing in doubled}))


def ends(losses: Sequence[float | None], steps: int) -> bool:
    """Whether a float32 run that may take `steps` has shown what it can.

    It ends at a landing from which its loss no longer falls by `STILL_FALLS` when the steps double,
    and where a loss is not finite.
    """
    made = len(losses)
    if made >= steps or any(loss is None or not math.isfinite(loss) for loss in losses):
        return True
    return made in landings(steps) and fall(losses) < STILL_FALLS


def settled(losses: Sequence[float | None], steps: int) -> int:
    """The length at which a run that may take `steps` ends; all of it, where it goes on."""
    ending = (
        made for made in landings(steps) if made <= len(losses) and ends(losses[:made], steps)
    )
    return next(ending, len(losses))


def fall(losses: Sequence[float | None]) -> float:
    """By which share the loss fell from the second quarter of a run to its last.

    Relative to the larger of both as magnitudes: a loss may be negative. The quarters' middles are
    a factor of 7/3 apart, close to a doubling.
    """
    known = [loss for loss in losses if loss is not None]
    quarter = len(known) // 4
    if not quarter:
        return 0.0
    before, after = mean(known[quarter : 2 * quarter]), mean(known[-quarter:])
    return (before - after) / (max(abs(before), abs(after)) or 1.0)
