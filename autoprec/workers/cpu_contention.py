"""Notices when other processes use the processors that a measurement needs, and waits for a pause.

One busy process on two cores slows a step not twofold but up to twentyfold (an MLP's took 328 ms
in place of 16), because threads that share a step wait for the slowest one, and nothing in the step
times says so. Linux counts every
processor's busy time (/proc/stat) and every process's own (/proc/PID/stat); the difference is other
processes'. Elsewhere nothing is known, or reported.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from autoprec.backends.protocol import DeviceMemory
from autoprec.core.speed.contention import BUSY_SHARE, Usage

_PROC = Path("/proc")

PATIENCE_SECONDS = 40.0
"""How long a tuning waits for other processes in all, and measures again what they disturbed."""

#: The longest pause to wait for at a time, and how often it is looked for. Desktop programs, a
#: compiler or a test run are busy for seconds; what is busy for longer seldom ends soon.
_LONGEST_WAIT_SECONDS, _POLL_SECONDS = 5.0, 0.2

#: The shortest interval whose share is known: 10 ms of each processor are counted at a time.
_SHORTEST_SECONDS = 0.1

#: The processes that a measurement uses, by number.
Pids = Callable[[], Sequence[int]]

T = TypeVar("T")


class ProcessorUsage:
    """Measures what other processes use of this process's processors."""

    def __init__(self, proc: Path = _PROC) -> None:
        self._proc = proc
        self._begin: tuple[float, float, float] | None = None

    def start(self, pids: Sequence[int]) -> None:
        """Begin an interval; this process, and `pids` with their children, are the tuning's own."""
        self._begin = self._read(pids)

    def usage(self, pids: Sequence[int]) -> Usage | None:
        """Return the usage of the processors since `start`; None if unknown."""
        begin, end = self._begin, self._read(pids)
        if begin is None or end is None or end[0] - begin[0] < _SHORTEST_SECONDS:
            return None
        wall, busy, own = (after - before for before, after in zip(begin, end, strict=True))
        total = wall * len(_processors())
        others, idle = (min(1.0, max(0.0, s / total)) for s in (busy - own, total - busy))
        return Usage(others, idle)

    def _read(self, pids: Sequence[int]) -> tuple[float, float, float] | None:
        busy = self._busy()
        if busy is None:
            return None
        own = sum(map(self._own, {os.getpid(), *self._with_children(pids)}))
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

    def _with_children(self, pids: Collection[int]) -> set[int]:
        """Return these processes and all that they started: a data loader's workers, say."""
        found, new = set[int](), set(pids)
        while new:
            found |= new
            new = {child for pid in new for child in self._children(pid)} - found
        return found

    def _children(self, pid: int) -> Iterator[int]:
        for file in (self._proc / str(pid) / "task").glob("*/children"):
            with contextlib.suppress(OSError):  # a thread that ends meanwhile
                yield from map(int, file.read_text().split())

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
    """Warn of other processes on an accelerator; empty if there is a desktop at most."""
    if memory.others <= _IDLE_DEVICE_BYTES:
        return ""
    return (
        f"other processes hold {memory.others / 2**30:.1f} GiB of this device: recipes are limited "
        f"to the {memory.free / 2**30:.1f} GiB that are free, and step times may be unreliable. "
        "Stop them, or tune again later with `fresh`"
    )


class ContentionMonitor:
    """Repeats measurements that other processes disturb, while its patience lasts.

    `patience` is what is left of it, in seconds. When it is over, what is disturbed counts; then
    `say` is called, once, and `worst` is the largest share of the processors that others used
    during such a measurement.
    """

    def __init__(self, say: Callable[[str], None], patience: float = PATIENCE_SECONDS) -> None:
        self._say, self.patience = say, patience
        self._waited = False
        self.worst = 0.0

    def undisturbed(
        self, measure: Callable[[], T], pids: Pids, repeatable: Callable[[T], bool] | None = None
    ) -> T:
        """Return what `measure` returns, of its first run during which other processes paused.

        `pids` are the processes that measure, which may start and end meanwhile. A result that is
        not `repeatable` (default: all are) counts as it is.
        """
        while True:
            meter = ProcessorUsage()
            began = time.monotonic()
            meter.start(pids())
            result = measure()
            usage = meter.usage(pids())
            if usage is None or not usage.is_high:
                return result
            taken = time.monotonic() - began
            may_repeat = repeatable is None or repeatable(result)
            worth_waiting = may_repeat and usage.is_crowded and taken <= self.patience
            if not worth_waiting or not self._wait_for_pause(usage.others, pids):
                self._count(usage.others)
                return result
            self.patience -= taken

    def _wait_for_pause(self, share: float, pids: Pids) -> bool:
        """Wait until other processes pause; say whether they did.

        Waiting in vain halves the patience left.
        """
        if not self._waited:
            self._say(
                f"other processes are using {share:.0%} of these processors: what they disturb is "
                f"measured again when they pause, for {self.patience:.0f} s in all at most"
            )
        self._waited = True
        began = time.monotonic()
        longest = min(_LONGEST_WAIT_SECONDS, self.patience)
        paused = False
        while not paused and time.monotonic() - began < longest:
            meter = ProcessorUsage()
            meter.start(pids())
            time.sleep(_POLL_SECONDS)
            usage = meter.usage(pids())
            paused = usage is None or not usage.is_high
        self.patience -= time.monotonic() - began
        self.patience /= 1 if paused else 2
        return paused

    def _count(self, share: float) -> None:
        if self.worst <= BUSY_SHARE:
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
