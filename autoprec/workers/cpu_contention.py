"""Notices when other processes use the processors that a measurement needs.

Two busy processes on two cores slow each other's steps many times over, and nothing in the step
times says so. Linux counts every processor's busy time (/proc/stat) and every process's own
(/proc/PID/stat); what is left over is others'. Elsewhere nothing is known and nothing is said.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from autoprec.backends.protocol import DeviceMemory

#: Others using more of the processors than this make a measurement doubtful.
BUSY_SHARE = 0.15
_PROC = Path("/proc")


class Neighbours:
    """The share of this process's processors that others used since `start`."""

    def __init__(self, proc: Path = _PROC) -> None:
        self._proc = proc
        self._begin: tuple[float, float, float] | None = None

    def start(self, pids: Sequence[int]) -> None:
        """Begin an interval; `pids` are the processes that are not others, besides this one."""
        self._begin = self._read(pids)

    def share(self, pids: Sequence[int]) -> float | None:
        """Others' share of the processors from 0 to 1 since `start`; None where it is not known."""
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
        """Busy seconds of the processors this process may use: user, nice, system, irq, steal."""
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
        """A process's seconds, and those of its children that ended: none is lost with them."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            text = (self._proc / str(pid) / "stat").read_text()
            fields = text.rpartition(")")[2].split()
            return sum(int(field) for field in fields[11:15]) / _ticks()
        return 0.0


#: Others on an accelerator that hold more than this have work of their own there, in bytes.
_HOLDS_WORK = 2**30


def said_of_others(memory: DeviceMemory) -> str:
    """What to say of others on an accelerator; empty where only a desktop, or nobody, is there."""
    if memory.others <= _HOLDS_WORK:
        return ""
    return (
        f"other processes hold {memory.others / 2**30:.1f} GiB of this device: recipes are kept to "
        f"the {memory.free / 2**30:.1f} GiB that are free, and step times measured beside others "
        "are doubtful. Stop them, or run the same command with --fresh later"
    )


class ContentionMonitor:
    """Watches measurements, says once that they are disturbed, and remembers the worst share."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.worst = 0.0

    @contextlib.contextmanager
    def over(self, pids: Callable[[], Sequence[int]]) -> Iterator[None]:
        """Watch one measurement by the processes `pids`, which may start and end meanwhile."""
        neighbours = Neighbours()
        neighbours.start(pids())
        yield
        share = neighbours.share(pids()) or 0.0
        if share > BUSY_SHARE >= self.worst:
            self._say(
                f"other processes are using {share:.0%} of these processors: step times measured "
                "beside them are doubtful. Stop them, or run the same command with --fresh later"
            )
        self.worst = max(self.worst, share)


def _ticks() -> int:
    return os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def _processors() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))
