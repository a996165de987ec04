"""When a tuning must end, and which part of its time each stage may use up.

One absolute moment is handed through all stages, so that what one took is not there for the next.
A stage looks at it between two trials, runs or rounds; what has begun is not torn apart.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

SEARCH_SHARE, PROOF_SHARE, CONFIRMATION_SHARE = 0.45, 0.8, 1.0
"""By which share of the time each stage has ended. The search comes first and finds something to do
for ever; a recipe that is neither proven nor confirmed is none."""


@dataclass(frozen=True)
class Deadline:
    """So many seconds from the moment `began`; infinity: no limit."""

    began: float = 0.0
    seconds: float = math.inf
    clock: Callable[[], float] = time.monotonic

    def of(self, share: float) -> float:
        """The moment at which this share of the time is over."""
        return self.began + share * self.seconds

    def passed(self, share: float) -> bool:
        """Whether this share of the time is over."""
        return self.clock() >= self.of(share)
