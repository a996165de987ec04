"""How long a proof may take, in the time of float32's steps and by the clock."""

from __future__ import annotations

import math
import time

from autoprec.core.judge import MIN_STEPS
from autoprec.core.trace import Trajectory

_SHADOW_SHARE = 0.15
"""The most of what is left that is kept for a shadow whose time is not known yet."""


class Allowance:
    """What is left to one proof, in seconds.

    It ends at the moment `deadline`; and where `steps` is given, the steps' own time must not add
    up to more than so many of float32's, those of the reference included. What building, tracing
    and compiling take counts for the deadline only.
    """

    def __init__(self, deadline: float, reference: Trajectory, steps: int | None) -> None:
        self._deadline = deadline
        self._pace = reference.pace
        self._left = math.inf if steps is None else self._pace * (steps - len(reference.losses))
        self._unpaid, self._guess = 0, 0.0

    def compared(self, points: int, twins: int, seconds: float) -> None:
        """The candidate took a shadow of `points` in `seconds`; float32 takes each `twins` times.

        How long one takes the candidate is known only when it has trained; until then it is
        guessed, which is too long by what it had to build.
        """
        self._left -= points * twins * self._pace
        self._unpaid, self._guess = points, seconds

    def ran(self, run: Trajectory) -> None:
        """The candidate ran."""
        self._left -= run.pace * (len(run.losses) + self._unpaid)
        self._unpaid, self._guess = 0, 0.0

    def spend(self, steps: int) -> None:
        """So many float32 steps were made."""
        self._left -= steps * self._pace

    @property
    def seconds(self) -> float:
        """What is left."""
        left = self._left - min(self._guess, _SHADOW_SHARE * self._left)
        return max(0.0, min(left, self._deadline - time.monotonic()))

    def worth_a_run(self, twins: int) -> bool:
        """Whether a candidate as fast as float32 could run long enough, and its `twins` too."""
        return self.seconds >= MIN_STEPS * (1 + twins) * self._pace
