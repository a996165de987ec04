"""How a batch job and the driver talk through a folder that both see.

A job appends its messages to a file of its own; the driver keeps a lease fresh, so that a job whose
driver has ended without a word ends, too.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from autoprec.core.fleet.node_types import NodeReport
from autoprec.errors import AutoprecError
from autoprec.fleet import node
from autoprec.fleet.messages import Message, TaskPlace, from_line, to_line

#: The driver renews its lease so often; a job that sees no new one for longer than the limit ends.
#: Network file systems show a change within a minute (NFS: acregmax, 60 s).
LEASE_SECONDS = 10.0
LEASE_LIMIT_SECONDS = 180.0


class MessageWriter:
    """Appends messages to a file, each whole and on disk before the next."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, message: Message) -> None:
        """Append one message."""
        with self._path.open("ab") as file:
            file.write(to_line(message))
            file.flush()
            os.fsync(file.fileno())


class MessageReader:
    """Reads the messages that have been appended to a file since the last time."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def read(self) -> list[Message]:
        """Return the new messages; one that is still being written is left for later."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                content = file.read()
        except FileNotFoundError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [from_line(line) for line in whole.splitlines()]


class DriverGone(AutoprecError):
    """The driver has ended; nobody waits for this job's result."""


class Lease:
    """The driver's sign of life: a file whose content changes as long as it runs."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._count, self._seen, self._changed = 0, b"", clock()
        self._renewed: float | None = None

    def renew(self) -> None:
        """Write another content, where the last one is old."""
        now = self._clock()
        if self._renewed is not None and now - self._renewed < LEASE_SECONDS:
            return
        self._count, self._renewed = self._count + 1, now
        with contextlib.suppress(OSError):
            self._path.write_text(f"{os.getpid()} {self._count}\n", encoding="utf-8")

    def check(self) -> None:
        """Raise `DriverGone` where the content has not changed for too long, or is gone."""
        try:
            content = self._path.read_bytes()
        except OSError:
            content = b""
        now = self._clock()
        if content and content != self._seen:
            self._seen, self._changed = content, now
        if now - self._changed > LEASE_LIMIT_SECONDS:
            raise DriverGone("the driver of this tuning has ended; its finished trials are kept")


def run_job(request: bytes, messages: Path, lease: Path) -> None:
    """Tune in a batch job; its messages go to a file."""
    write, alive = MessageWriter(messages), Lease(lease)

    def send(message: Message) -> None:
        write(message)
        alive.check()

    node.tune_here(request, send)


def probe_job(place: TaskPlace, device: str | None) -> NodeReport:
    """Probe the machine that this job runs on; `node` is what SLURM calls it, "" elsewhere."""
    return replace(node.probe_node(place, device), node=os.environ.get("SLURMD_NODENAME", ""))
