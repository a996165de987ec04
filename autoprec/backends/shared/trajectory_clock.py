"""Times the steps of a trajectory, and says when its time is up."""

from __future__ import annotations

import itertools
import time

from autoprec.backends.shared.ranks import Agree, unchanged


class StepClock:
    """Marks where each step begins; the first step, which builds and compiles, is apart.

    `seconds` is how long a run may go on after its first step (None: as long as it likes). Where
    this process does the work itself (`on_cpu`), a step takes no longer than the processor
    time it took: what else runs on the machine delays it, but is no part of it. `agree` lets
    ranks that train together end at the same step: when the slowest one's time is up.
    """

    def __init__(
        self, seconds: float | None = None, *, on_cpu: bool = False, agree: Agree = unchanged
    ) -> None:
        self._seconds, self._on_cpu, self._agree = seconds, on_cpu, agree
        self._started = time.perf_counter()
        self._marks: list[float] = []
        self._cpu_marks: list[float] = []

    def tick(self) -> bool:
        """Mark that a step begins, or the last one has ended; False where the time is up."""
        self._marks.append(time.perf_counter())
        self._cpu_marks.append(time.process_time())
        made = len(self._marks) - 1
        if self._seconds is None or made < 1:
            return True
        return self._agree(self._marks[-1] - self._marks[1]) < self._seconds

    @property
    def elapsed(self) -> float:
        """Return the seconds since the clock was made."""
        return time.perf_counter() - self._started

    @property
    def step_seconds(self) -> float:
        """Return the shortest step after the first; the first where it is alone, else 0."""
        times = [after - before for before, after in itertools.pairwise(self._marks)]
        if self._on_cpu:
            worked = [after - before for before, after in itertools.pairwise(self._cpu_marks)]
            times = [min(pair) for pair in zip(times, worked, strict=True)]
        return min(times[1:] or times or [0.0])
