"""When a tuning must end, and which share of its time has passed when each stage must end.

One absolute deadline is handed through all stages, so that the time one stage used is gone for the
next. A stage begins a trial, a check or rounds only if what they are expected to take, by the steps
and compilers seen so far, fits into what is left of its share; what has begun is not interrupted.
The search ends earlier than at its share where the check that follows it needs the time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

SEARCH_SHARE, PROOF_SHARE, CONFIRMATION_SHARE = 0.45, 0.8, 1.0
"""Shares of the time limit by which each stage ends. The search runs first and never runs out of
recipes to try, but a recipe that is neither proven nor confirmed cannot be chosen."""

DESCRIPTION_SHARE = 0.2
"""When the description of the task leaves out what it can: what explains the time of a step,
further batches that are compared with their halves, and the device's products."""

SECOND_SEARCH_SHARE = 0.6
"""When the search ends that goes on after the first proofs, because they refused bfloat16."""

LEAST_SEARCH_SHARE = 0.3
"""The search ends before `SEARCH_SHARE` where the check needs the time, but not before this."""

SHORTEST_PROOF_STEPS = 40
"""What the shortest proof takes, in float32 steps at the recipe's batch, with a margin (see
`tuning.proof.duration`), where the task has no `evaluate`."""


@dataclass(frozen=True)
class Deadline:
    """A time limit in seconds, counted from the clock reading `began`; infinity means no limit."""

    began: float = 0.0
    seconds: float = math.inf
    clock: Callable[[], float] = time.monotonic

    def end_of(self, share: float) -> float:
        """Return the clock reading at which this share of the time has passed."""
        return self.began + share * self.seconds

    def left(self, share: float) -> float:
        """Return the seconds until this share of the time has passed; negative afterwards."""
        return self.end_of(share) - self.clock()

    def passed(self, share: float) -> bool:
        """Say whether this share of the time has passed."""
        return self.clock() >= self.end_of(share)

    def share_before(self, share: float, check_seconds: Iterable[float]) -> float:
        """Return the share, at most `share`, by which to end so that a check has its time.

        `check_seconds` are what the check takes, and what shorter ones do, for where that is too
        long. Where none would end in time, less of a search would help nothing.
        """
        ends = (PROOF_SHARE - seconds / self.seconds for seconds in check_seconds)
        return min(share, next((end for end in ends if end >= LEAST_SEARCH_SHARE), share))

    @property
    def longest_step(self) -> float:
        """Return the seconds of the longest step that can be proven once the search has ended."""
        return (PROOF_SHARE - SEARCH_SHARE) * self.seconds / SHORTEST_PROOF_STEPS
