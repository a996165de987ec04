"""Tells whether a float32 run learned anything: a proof over steps without learning says little."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from autoprec.core.numerics.loss_origin import loss_origin
from autoprec.core.numerics.tolerance import mean

LEAST_STEPS = 10
"""Shorter runs are not judged: their fifths are single steps."""

LEAST_FALL = 0.02
"""A loss that fell by a smaller share of what is above its origin shows no learning."""

STANDARD_ERRORS = 2.0
"""A fall must be so many standard errors of the difference between batches."""


def has_learned(losses: Sequence[float | None]) -> bool:
    """Say whether a loss fell from the first fifth of a run to its last, by more than chance.

    Batches differ; by how much, the changes from each step to the next tell. `losses` count from
    zero as the task gives them. A run of fewer than `LEAST_STEPS` is not doubted, nor is one that
    was not finite.
    """
    known = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    if len(known) < max(LEAST_STEPS, len(losses)):
        return True
    fifth = len(known) // 5
    first, last = mean(known[:fifth]), mean(known[-fifth:])
    variance = mean((after - before) ** 2 for before, after in pairwise(known)) / 2
    error = math.sqrt(2 * variance / fifth)
    height = max(first - loss_origin(known), 1e-300)
    return first - last > STANDARD_ERRORS * error and (first - last) / height >= LEAST_FALL
