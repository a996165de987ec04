"""The parent side of a worker: starts it, calls it, watches it, and ends it.

A call sends one message and waits for its answer. Progress (phase and step) restarts the phase's
clock; a phase that makes no progress for longer than its allowance is a timeout, and the worker's
whole process group is killed. A worker that dies is told apart by how it died.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autoprec.core.codec import from_plain, to_plain
from autoprec.errors import UsageError
from autoprec.tuning.failures import (
    FailureKind,
    WorkerFailure,
    classify_exit,
    describe_exit,
    match,
)
from autoprec.tuning.messages import ChannelClosed, receive, send
from autoprec.tuning.service import Loaded, hints

#: Seconds without progress that a phase may take. Compilation and first steps are slow and silent.
PHASE_SECONDS: Mapping[str, float] = {
    "start": 120.0,
    "load": 300.0,
    "build": 600.0,
    "data": 600.0,
    "compile": 1200.0,
    "warmup": 900.0,
    "describe": 600.0,
}
STEP_SECONDS = 300.0
_LAST_LINES = 20

OnProgress = Callable[[str, int], None]


@dataclass(frozen=True)
class WorkerSettings:
    """How a worker is started: its task, device, memory limit and environment."""

    task: Path
    device: str = "cpu"
    memory_bytes: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    step_seconds: float = STEP_SECONDS


class Worker:
    """One worker process that has the task loaded."""

    def __init__(self, settings: WorkerSettings) -> None:
        if os.name != "posix":
            raise UsageError("tuning needs Linux or macOS; probe and apply_profile work here")
        self.settings = settings
        self._log = tempfile.TemporaryFile(prefix="autoprec-worker-")  # noqa: SIM115 - closed below
        ours, theirs = socket.socketpair()
        wait, self._lifeline = os.pipe()
        arguments = {
            "channel": theirs.fileno(),
            "lifeline": wait,
            "memory_bytes": settings.memory_bytes,
        }
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "autoprec.tuning.worker", json.dumps(arguments)],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(), wait),
                start_new_session=True,
                env={**os.environ, **_QUIET, **settings.environment},
            )
        finally:
            theirs.close()
            os.close(wait)
        self._channel = ours
        self._phase = "start"
        self.loaded: Loaded | None = None

    @property
    def pid(self) -> int:
        """The worker's process id, which is its process group's too."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def load(self, on_progress: OnProgress | None = None) -> Loaded:
        """Load the task file, once."""
        if self.loaded is None:
            self.loaded = self.call(
                "load",
                on_progress=on_progress,
                path=str(self.settings.task),
                device=self.settings.device,
            )
        return self.loaded

    def call(self, method: str, *, on_progress: OnProgress | None = None, **arguments: Any) -> Any:
        """Call a method of `Service` and wait; `WorkerFailure` if it or the worker fails."""
        self._phase = "load" if method == "load" else "start"
        try:
            send(
                self._channel,
                {"call": method, "arguments": {k: to_plain(v) for k, v in arguments.items()}},
            )
            answer = self._wait(on_progress)
        except ChannelClosed:
            raise self._died() from None
        except BaseException:
            self.kill()
            raise
        if "failure" in answer:
            failure = answer["failure"]
            raise WorkerFailure(
                FailureKind(failure["kind"]),
                failure["message"],
                frames=failure.get("frames", ""),
                phase=self._phase,
            )
        return from_plain(hints(method)["return"], answer["result"])

    def _wait(self, on_progress: OnProgress | None) -> dict[str, Any]:
        while True:
            allowed = PHASE_SECONDS.get(self._phase, self.settings.step_seconds)
            self._channel.settimeout(allowed)
            try:
                message = receive(self._channel)
            except TimeoutError:
                self.kill()
                raise WorkerFailure(
                    FailureKind.TIMEOUT,
                    f"no progress for {allowed:.0f} s in the phase {self._phase!r}",
                    phase=self._phase,
                ) from None
            if "progress" not in message:
                return message
            phase, step = message["progress"]
            self._phase = str(phase)
            if on_progress is not None:
                on_progress(self._phase, int(step))

    def _died(self) -> WorkerFailure:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        code = self._process.poll()
        printed = self.printed()
        self.kill()
        if code is None:
            return WorkerFailure(
                FailureKind.EXITED, "closed its channel", frames=printed, phase=self._phase
            )
        kind = classify_exit(code, printed)
        message = f"the worker {describe_exit(code)} in the phase {self._phase!r}"
        if kind is FailureKind.EXITED and match(printed) is None and code >= 0:
            message += "; does the task call os._exit?"
        return WorkerFailure(kind, message, frames=printed, phase=self._phase)

    def printed(self) -> str:
        """The last lines the worker printed."""
        try:
            size = self._log.seek(0, os.SEEK_END)
            self._log.seek(max(0, size - 20_000))
            text = self._log.read().decode(errors="replace")
        except (OSError, ValueError):
            return ""
        return "\n".join(text.splitlines()[-_LAST_LINES:])

    def kill(self) -> None:
        """End the worker's whole process group at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.close(self._lifeline)
        self._lifeline = -1
        with contextlib.suppress(OSError):
            self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)
        with contextlib.suppress(OSError):
            self._log.close()

    def close(self) -> None:
        """Let the worker end by itself, then make sure of it."""
        with contextlib.suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        deadline = time.monotonic() + 2
        while self.alive and time.monotonic() < deadline:
            time.sleep(0.02)
        self.kill()


_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
