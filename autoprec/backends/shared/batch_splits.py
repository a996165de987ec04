"""Judges on several batches whether a batch may be split: the first says little of the others.

A loss that is a mean over something counted in the batch (valid words, objects, class weights)
splits exactly where both halves happen to count the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from autoprec.backends.protocol import ProgressCallback
from autoprec.core.dtypes import DType
from autoprec.core.number_words import plain_number

COMPARED_BATCHES = 6
"""How many batches are cut in two and compared with their halves."""

_LEAST_COMPARED = 2

_SECONDS = 10.0
"""After so long no further batch is compared, once there were the least."""

_GRADIENT_TOLERANCE = 1e-4
"""How far halves' gradients may be from the batch's in float32, relative to its norm."""

_ROUNDOFFS = 3.0
"""The same in 16 bits, in unit roundoffs of the coarsest dtype. Measured on batches of 8 to 256 of
five models without BatchNorm in bfloat16 and float16: 0.6 to 1.3; with BatchNorm 22 and more."""

BATCH_CAUSES = "BatchNorm, in-batch negatives, a summed loss or a mean over padded texts does this"
COUNT_CAUSES = (
    "those of the first batch agree: a mean over what is counted in the batch does this, such as "
    "valid words, objects or class weights"
)


@dataclass(frozen=True)
class Splitting:
    """Whether a batch may be split, else why not; `compared` batches took `seconds` each.

    With `fixed`, no other batch size trains at all.
    """

    allowed: bool
    reason: str = ""
    compared: int = 0
    seconds: float = 0.0
    cut_short: bool = False
    fixed: bool = False

    def warnings(self) -> tuple[str, ...]:
        """Say where only few batches could be compared."""
        if not self.cut_short:
            return ()
        count = "1 batch" if self.compared == 1 else f"{self.compared} batches"
        return (
            f"that a batch may be split was seen on {count} only: comparing one with its halves "
            f"takes {plain_number(self.seconds, 2)} s",
        )


def gradient_tolerance(low: Collection[DType]) -> float:
    """Return how far halves' gradients may be from the batch's, relative to its norm.

    `low` are the 16-bit dtypes that the task itself keeps weights or computes in.
    """
    coarsest = max((each.limits.unit_roundoff for each in low), default=0.0)
    return max(_GRADIENT_TOLERANCE, _ROUNDOFFS * coarsest)


def judge_splitting(
    indices: Iterable[int],
    reason_against: Callable[[int], str],
    report: ProgressCallback,
    seconds: float | None = None,
) -> Splitting:
    """Ask for each batch for a reason against splitting it, until there is one or time is over.

    `indices` are the batches' places in the data, the first of them 0. Each is progress that is
    reported: a slow model is not taken for hung. With `seconds`, only the first one may exceed
    those, by what it takes.
    """
    start = time.monotonic()
    places = list(indices)
    for compared, index in enumerate(places):
        spent = time.monotonic() - start
        each = spent / max(compared, 1)
        late = compared >= _LEAST_COMPARED and spent > _SECONDS
        if late or (compared and seconds is not None and spent + each > seconds):
            return Splitting(True, "", compared, each, cut_short=True)
        report("describe", 0)
        reason = reason_against(index)
        if reason:
            return Splitting(False, reason, compared + 1)
    return Splitting(True, compared=len(places))


def explain_difference(error: float, index: int) -> str:
    """Say by how much a batch's halves differ from it, and what does that."""
    place, causes = (f" in batch {index}", COUNT_CAUSES) if index else ("", BATCH_CAUSES)
    return f"two halves' gradients differ from the whole batch's by {error:.2g}{place} ({causes})"


def in_batch(reason: str, index: int) -> str:
    """Return a reason with the batch it was found in, if that is not the first."""
    named = f"in batch {index}"
    return f"{reason}, {named}" if reason and index and named not in reason else reason
