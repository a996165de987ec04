"""The process between the tuner and its worker: nothing that a trial starts outlives the tuner.

The guard forks the worker and then only waits: for the worker's end, for the tuner's end (a pipe
that only the tuner holds closes, or the tuner is no longer its parent), and for memory use beyond
the budget. It runs none of the user's code and needs nothing from the worker, so it can end a
worker that is stuck in C code with the interpreter's lock, or that ignores every signal. On Linux
the worker's orphans are reparented to the guard (PR_SET_CHILD_SUBREAPER), those that left its
process group and session included, and the worker dies with the guard (PR_SET_PDEATHSIG).

How the worker ended is written to a pipe as one line of JSON, so that no exit code chosen by the
user's code is mistaken for something else. Imports stay few: this runs at every worker's start.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import time
from pathlib import Path

from autoprec.backends.shared.process_memory import sizes_in

LINUX = sys.platform.startswith("linux")

_POLL_SECONDS = 0.1
_DESCENDANTS_INTERVAL_SECONDS = 1.0
_GRACE_SECONDS = 0.3
_MAX_LOG_BYTES = 64 * 2**20
_LOW_MEMORY_BYTES = 128 * 2**20

# Linux, include/uapi/linux/prctl.h
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def fork_under_guard(
    *, tuner: int, lifeline: int, status: int, others: tuple[int, ...], most_bytes: int | None
) -> None:
    """Fork; return in the worker, while the calling process becomes its guard and never returns.

    `tuner` is the tuner's process id, `lifeline` the reading end of a pipe it holds, `status` where
    the worker's id and its end are written, `others` descriptors that are the worker's alone, and
    `most_bytes` the resident memory the worker and its children may have together.
    """
    guard = os.getpid()
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ready, tell_ready = os.pipe()
    worker = os.fork()
    if worker == 0:
        _write_report(status, {"worker": os.getpid()})  # known before its first answer
        for descriptor in (lifeline, status, ready):
            os.close(descriptor)
        os.setpgid(0, 0)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)
        os.close(tell_ready)
        return
    os.close(tell_ready)
    os.read(ready, 1)
    os.close(ready)
    for descriptor in others:
        os.close(descriptor)
    try:
        _Guard(worker, tuner, lifeline, status, most_bytes).run()
    finally:
        os._exit(0)


def _write_report(status: int, report: dict[str, object]) -> None:
    with contextlib.suppress(OSError):
        os.write(status, json.dumps(report).encode() + b"\n")


def _prctl(option: int, value: int) -> None:
    if LINUX:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class _Guard:
    """Waits for an end, then ends the worker and all its descendants."""

    def __init__(
        self, worker: int, tuner: int, lifeline: int, status: int, most_bytes: int | None
    ) -> None:
        self._worker, self._tuner = worker, tuner
        self._lifeline, self._status = lifeline, status
        self._most_bytes = most_bytes
        self._descendants: list[int] = [worker]
        self._descendants_listed_at = 0.0
        self._ended: dict[str, object] | None = None

    def run(self) -> None:
        """Wait until the worker has ended or has to; leave no process behind."""
        wake = self._ignore_signals()
        over: str | None = None
        while self._tuner_is_alive() and over is None and not self._worker_has_ended():
            readable, _, _ = select.select([self._lifeline, wake], [], [], _POLL_SECONDS)
            if wake in readable:
                with contextlib.suppress(OSError):
                    os.read(wake, 4096)
            if self._lifeline in readable:
                break
            self._truncate_large_log()
            over = self._over_budget()
        self._end_worker()
        self._end_descendants()
        report = self._ended or {}
        _write_report(self._status, {**report, "memory": over} if over else report)

    def _ignore_signals(self) -> int:
        """Ignore signals that may be sent to a group; wake up when a child ends."""
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_IGN)
        read, write = os.pipe()
        os.set_blocking(read, False)
        os.set_blocking(write, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        return read

    def _tuner_is_alive(self) -> bool:
        return os.getppid() == self._tuner

    def _worker_has_ended(self) -> bool:
        self._reap()
        return self._ended is not None

    def _reap(self) -> bool:
        """Collect every child that ended; False when there is no child left."""
        while True:
            try:
                child, how = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if child == 0:
                return True
            if child == self._worker:
                signalled = os.WIFSIGNALED(how)
                self._ended = (
                    {"signal": os.WTERMSIG(how)} if signalled else {"code": os.WEXITSTATUS(how)}
                )

    def _end_worker(self) -> None:
        if self._ended is None:
            with contextlib.suppress(OSError):
                os.kill(self._worker, signal.SIGKILL)

    def _end_descendants(self) -> None:
        """End what the worker started: a moment for those that end by themselves, then SIGKILL."""
        deadline = time.monotonic() + _GRACE_SECONDS
        while self._reap() and time.monotonic() < deadline:
            time.sleep(0.005)
        with contextlib.suppress(OSError):
            os.killpg(self._worker, signal.SIGKILL)
        while self._reap():
            for child in children_of(os.getpid()):
                with contextlib.suppress(OSError):
                    os.kill(child, signal.SIGKILL)
            time.sleep(0.005)

    def _truncate_large_log(self) -> None:
        """Keep the last of what the user's code prints, not all of it until the disk is full."""
        with contextlib.suppress(OSError):
            if os.fstat(1).st_size > _MAX_LOG_BYTES:
                os.ftruncate(1, 0)

    # Memory --------------------------------------------------------------------------------------

    def _over_budget(self) -> str | None:
        """Say what exceeds the budget; None while nothing does."""
        if self._most_bytes is None:
            return None
        if time.monotonic() - self._descendants_listed_at >= _DESCENDANTS_INTERVAL_SECONDS:
            self._refresh_descendants()
        elif not LINUX:
            return None  # asking ps(1) ten times a second would disturb what is measured
        held = sum(resident_bytes(each) for each in self._descendants)
        if held > self._most_bytes and len(self._descendants) > 1:
            self._refresh_descendants()
            held = sum(proportional_bytes(each) for each in self._descendants)
        if held > self._most_bytes:
            return f"{_gib(held)} were resident of the {_gib(self._most_bytes)} there are"
        left = available_bytes()
        if left is not None and left < _LOW_MEMORY_BYTES < held:
            return f"only {_gib(left)} of main memory were left"
        return None

    def _refresh_descendants(self) -> None:
        self._descendants = [self._worker, *descendants_of(self._worker)]
        self._descendants_listed_at = time.monotonic()


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"


def resident_bytes(process: int) -> int:
    """Return the resident bytes of a process; 0 if it has ended or cannot be read."""
    if not LINUX:
        return sum(resident for pid, _, resident in _list_processes() if pid == process)
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def proportional_bytes(process: int) -> int:
    """Return a process's proportional set size: forked children share most of their memory."""
    return sizes_in(f"/proc/{process}/smaps_rollup").get("Pss") or resident_bytes(process)


def available_bytes() -> int | None:
    """Return the bytes usable without swapping (MemAvailable, proc(5)); None if unknown."""
    return sizes_in("/proc/meminfo").get("MemAvailable")


def descendants_of(process: int) -> list[int]:
    """List the children of a process, their children, and so on."""
    children: dict[int, list[int]] = {}
    for child, parent in _list_parents():
        children.setdefault(parent, []).append(child)
    found: list[int] = []
    waiting = [process]
    while waiting:
        next_ones = children.get(waiting.pop(), [])
        found += next_ones
        waiting += next_ones
    return found


def children_of(process: int) -> list[int]:
    """List the direct children of a process."""
    return [child for child, parent in _list_parents() if parent == process]


def _list_parents() -> list[tuple[int, int]]:
    """List (process, parent) of every visible process."""
    if not LINUX:
        return [(pid, parent) for pid, parent, _ in _list_processes()]
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError, ValueError, IndexError):
                    text = Path(f"/proc/{name}/stat").read_text(errors="replace")
                    found.append((int(name), int(text.rpartition(")")[2].split()[1])))
    return found


def _list_processes() -> list[tuple[int, int, int]]:
    """List (process, parent, resident bytes) by ps(1), for systems without /proc."""
    import subprocess

    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
        text = subprocess.run(
            ["ps", "-axo", "pid=,ppid=,rss="], capture_output=True, text=True, timeout=5, check=True
        ).stdout
        rows = (line.split() for line in text.splitlines())
        return [(int(pid), int(parent), int(kib) * 1024) for pid, parent, kib in rows]
    return []
