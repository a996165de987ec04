"""Notices when other processes use the processors that a measurement needs.

Two busy processes on two cores slow each other's steps many times over, and nothing in the step
times says so. Linux counts every processor's busy time (/proc/stat) and every process's own
(/proc/PID/stat); the difference is other processes'. Elsewhere nothing is known, or reported.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from autoprec.backends.protocol import DeviceMemory

#: Where other processes use more of the processors than this, a measurement is unreliable.
BUSY_SHARE = 0.15
_PROC = Path("/proc")


class ProcessorShare:
    """Measures the share of this process's processors that other processes use."""

    def __init__(self, proc: Path = _PROC) -> None:
        self._proc = proc
        self._begin: tuple[float, float, float] | None = None

    def start(self, pids: Sequence[int]) -> None:
        """Begin an interval; `pids` and this process are the tuning's own processes."""
        self._begin = self._read(pids)

    def share(self, pids: Sequence[int]) -> float | None:
        """Return others' share (0 to 1) of the processors since `start`; None where unknown."""
        begin, end = self._begin, self._read(pids)
        if begin is None or end is None or end[0] - begin[0] < 0.2:
            return None
        wall, busy, own = (after - before for before, after in zip(begin, end, strict=True))
        return min(1.0, max(0.0, (busy - own) / (wall * len(_processors()))))

    def _read(self, pids: Sequence[int]) -> tuple[float, float, float] | None:
        busy = self._busy()
        if busy is None:
            return None
        own = sum(self._own(pid) for pid in {os.getpid(), *pids})
        return time.monotonic(), busy, own

    def _busy(self) -> float | None:
        """Sum the busy seconds (user, nice, system, irq, steal) of the processors usable here."""
        wanted = {f"cpu{number}" for number in _processors()}
        total = None
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in (self._proc / "stat").read_text().splitlines():
                words = line.split()
                if words and words[0] in wanted:
                    numbers = [int(word) for word in words[1:9]]
                    idle = numbers[3] + numbers[4]
                    total = (total or 0.0) + (sum(numbers) - idle) / _ticks()
        return total

    def _own(self, pid: int) -> float:
        """Sum a process's CPU seconds and those of its children that have ended."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            text = (self._proc / str(pid) / "stat").read_text()
            fields = text.rpartition(")")[2].split()
            return sum(int(field) for field in fields[11:15]) / _ticks()
        return 0.0


#: Other processes that hold more than this on an accelerator are computing there.
_IDLE_DEVICE_BYTES = 2**30


def warn_of_other_users(memory: DeviceMemory) -> str:
    """Warn of other processes on an accelerator; empty where there is a desktop at most."""
    if memory.others <= _IDLE_DEVICE_BYTES:
        return ""
    return (
        f"other processes hold {memory.others / 2**30:.1f} GiB of this device: recipes are limited "
        f"to the {memory.free / 2**30:.1f} GiB that are free, and step times may be unreliable. "
        "Stop them, or tune again later with `fresh`"
    )


class ContentionMonitor:
    """Watches measurements, says once that they are disturbed, and remembers the worst share."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.worst = 0.0

    @contextlib.contextmanager
    def over(self, pids: Callable[[], Sequence[int]]) -> Iterator[None]:
        """Watch one measurement made by the processes `pids`, which may start and end meanwhile."""
        neighbours = ProcessorShare()
        neighbours.start(pids())
        yield
        share = neighbours.share(pids()) or 0.0
        if share > BUSY_SHARE >= self.worst:
            self._say(
                f"other processes are using {share:.0%} of these processors, which makes step "
                "times unreliable. Stop them, or tune again later with `fresh`"
            )
        self.worst = max(self.worst, share)


def _ticks() -> int:
    return os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def _processors() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))
