"""Times the steps of a trajectory, and says when its time is up."""

from __future__ import annotations

import itertools
import time


class StepClock:
    """Marks where each step begins; the first step, which builds and compiles, is apart.

    `seconds` is how long a run may go on after its first step (None: as long as it likes).
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._seconds = seconds
        self._begun = time.perf_counter()
        self._marks: list[float] = []

    def tick(self) -> bool:
        """Mark that a step begins, or the last one has ended; False where the time is up."""
        self._marks.append(time.perf_counter())
        made = len(self._marks) - 1
        if self._seconds is None or made < 1:
            return True
        return self._marks[-1] - self._marks[1] < self._seconds

    @property
    def elapsed(self) -> float:
        """The seconds since the clock was made."""
        return time.perf_counter() - self._begun

    @property
    def step_seconds(self) -> float:
        """The least time of the steps after the first; of the first where it is alone, else 0."""
        times = [after - before for before, after in itertools.pairwise(self._marks)]
        return min(times[1:] or times or [0.0])
