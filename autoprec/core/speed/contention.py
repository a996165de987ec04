"""Decides whether what other processes used of the processors disturbed a measurement."""

from __future__ import annotations

from dataclasses import dataclass

BUSY_SHARE = 0.15
"""Where other processes use more of the processors than this, a measurement is unreliable."""


@dataclass(frozen=True)
class Usage:
    """The shares (0 to 1) of this process's processors that others used, and that nobody did."""

    others: float
    idle: float

    @property
    def is_high(self) -> bool:
        """Whether others use so much that a measurement is unreliable."""
        return self.others > BUSY_SHARE

    @property
    def is_crowded(self) -> bool:
        """Whether others did not have room enough beside the tuning's own processes.

        A container that may use 2 of its host's 64 processors sees all of them: others' use leaves
        it its two.
        """
        return self.is_high and self.others > self.idle
