"""The parent side of a worker: starts it, calls it, watches it, and ends it.

A call sends one message and waits for its answer. Progress (phase and step) restarts the phase's
clock; a phase that makes no progress for longer than its allowance is a timeout, and everything the
worker started is ended. The ways in which a worker can die are told apart.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from autoprec.backends import registry
from autoprec.backends.protocol import ProgressCallback
from autoprec.core.codec import from_plain, to_plain
from autoprec.errors import UsageError
from autoprec.workers.channel import TOKEN_BYTES, Channel, ChannelClosed
from autoprec.workers.failures import (
    FailureKind,
    WorkerFailure,
    classify_exit,
    describe_exit,
    match_failure,
)
from autoprec.workers.handlers import LoadedTask, type_hints_of
from autoprec.workers.memory_limit import memory_budget
from autoprec.workers.timeouts import (
    FIRST_STEP_TIMEOUT_SECONDS,
    allowed_seconds,
    explain_timeout,
    patience_factor,
)

_FIRST_PHASE_OF = {"load": "load", "time": "steps"}
_SHOWN_LOG_LINES = 40
_EXIT_WAIT_SECONDS = 5.0


@dataclass(frozen=True)
class WorkerSettings:
    """How a worker is started: its task, device, memory limit and environment.

    `memory_bytes` limits main memory; without it the worker is only kept from taking what the
    machine has left. A device's own memory is the session's to limit. Models begin with the weights
    of `checkpoint`, where one is given.
    """

    task: Path
    device: str = "cpu"
    checkpoint: Path | None = None
    memory_bytes: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    step_seconds: float = FIRST_STEP_TIMEOUT_SECONDS


class Worker:
    """One worker process that has the task loaded, and its guard."""

    def __init__(self, settings: WorkerSettings) -> None:
        if os.name != "posix":
            raise UsageError("tuning needs Linux or macOS; probe and apply_profile work here")
        self.settings = settings
        self.loaded: LoadedTask | None = None
        self._patience = patience_factor()
        self._phase = "start"
        self._slowest_step = 0.0
        self._log = _open_log()
        with contextlib.ExitStack() as worker_ends:
            ours, channel = socket.socketpair()
            worker_ends.callback(channel.close)
            lifeline, self._lifeline = os.pipe()
            worker_ends.callback(os.close, lifeline)
            self._status, status = os.pipe()
            worker_ends.callback(os.close, status)
            token = secrets.token_bytes(TOKEN_BYTES)
            self._channel = Channel(ours, token)
            arguments = {
                "channel": channel.fileno(),
                "lifeline": lifeline,
                "status": status,
                "token": token.hex(),
                "tuner": os.getpid(),
                "memory_bytes": settings.memory_bytes,
                "watch_bytes": settings.memory_bytes or memory_budget(None),
            }
            try:
                # -P: a random.py in the current folder must not take the place of Python's own.
                self._process = subprocess.Popen(
                    [sys.executable, "-P", _SCRIPT, json.dumps(arguments)],
                    stdin=subprocess.DEVNULL,
                    stdout=self._log or subprocess.DEVNULL,
                    stderr=subprocess.STDOUT,
                    pass_fds=(channel.fileno(), lifeline, status),
                    start_new_session=True,
                    env={**os.environ, **_worker_environment(), **settings.environment},
                )
            except BaseException:
                self._close_descriptors()
                raise

    @property
    def pid(self) -> int:
        """Return the worker's process id; its guard's until the guard has reported the worker's."""
        return self._worker_process() or self._process.pid

    @property
    def alive(self) -> bool:
        """Return whether the process still runs."""
        return self._process.poll() is None

    def load(self, on_progress: ProgressCallback | None = None) -> LoadedTask:
        """Load the task file, once."""
        if self.loaded is None:
            checkpoint = self.settings.checkpoint
            self.loaded = self.call(
                "load",
                on_progress=on_progress,
                path=str(self.settings.task),
                device=self.settings.device,
                checkpoint=None if checkpoint is None else str(checkpoint),
            )
        return self.loaded

    def call(
        self, method: str, *, on_progress: ProgressCallback | None = None, **arguments: Any
    ) -> Any:
        """Call a method of `Service` and wait; `WorkerFailure` if it or the worker fails."""
        self._phase = _FIRST_PHASE_OF.get(method, "start")
        try:
            self._channel.send(
                {"call": method, "arguments": {k: to_plain(v) for k, v in arguments.items()}},
            )
            answer = self._wait(on_progress)
        except ChannelClosed:
            raise self._death_failure() from None
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
        return from_plain(type_hints_of(method)["return"], answer["result"])

    def _wait(self, on_progress: ProgressCallback | None) -> dict[str, Any]:
        since = time.monotonic()
        while True:
            allowed = self._allowance()
            try:
                message = self._channel.receive(allowed)
            except TimeoutError:
                raise self._timeout_failure(allowed) from None
            if "progress" not in message:
                return message
            phase, step = message["progress"]
            now = time.monotonic()
            if str(phase) == self._phase == "steps":
                self._slowest_step = max(self._slowest_step, now - since)
            self._phase, since = str(phase), now
            if on_progress is not None:
                on_progress(self._phase, int(step))

    def _allowance(self) -> float:
        """Return the seconds that the phase may go on without progress."""
        return allowed_seconds(
            self._phase,
            first_step_seconds=self.settings.step_seconds,
            slowest_step_seconds=self._slowest_step,
            patience=self._patience,
        )

    # How it ended --------------------------------------------------------------------------------

    def _timeout_failure(self, allowed: float) -> WorkerFailure:
        before = self.printed()
        process = self._worker_process()
        if process is not None:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGUSR1)  # the worker shows where it is
                time.sleep(0.3)
        shown = self.printed()
        self.kill()
        return WorkerFailure(
            FailureKind.TIMEOUT,
            explain_timeout(self._phase, allowed),
            frames=_without_autoprec_frames(shown) or before,
            phase=self._phase,
        )

    def _death_failure(self) -> WorkerFailure:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_EXIT_WAIT_SECONDS)
        report = self._report()
        printed = self.printed()
        guard = self._process.poll()
        self.kill()
        if report.get("memory"):
            return WorkerFailure(
                FailureKind.OUT_OF_MEMORY,
                f"ended by autoprec before the kernel would: {report['memory']}",
                phase=self._phase,
            )
        code = _exit_code(report, guard)
        if code is None:
            return WorkerFailure(
                FailureKind.EXITED,
                f"the task closed the worker's channel in the phase {self._phase!r}; does it close "
                "descriptors it did not open?",
                frames=printed,
                phase=self._phase,
            )
        kind = classify_exit(code, printed)
        message = f"the worker {describe_exit(code)} in the phase {self._phase!r}"
        if kind is FailureKind.EXITED and match_failure(printed) is None and code >= 0:
            message += "; does the task call os._exit?"
        return WorkerFailure(
            kind, message, frames=_without_autoprec_frames(printed), phase=self._phase
        )

    def _report(self) -> dict[str, Any]:
        """Merge all status lines the guard has written so far."""
        with contextlib.suppress(OSError, ValueError):
            while select.select([self._status], [], [], 0)[0]:
                part = os.read(self._status, 1 << 16)
                if not part:
                    break
                self._guard_output += part
        report: dict[str, Any] = {}
        for line in self._guard_output.splitlines():
            with contextlib.suppress(ValueError):
                report.update(json.loads(line))
        return report

    _guard_output = b""

    def _worker_process(self) -> int | None:
        process = self._report().get("worker")
        return process if isinstance(process, int) else None

    def printed(self) -> str:
        """Return the last lines the worker printed."""
        if self._log is None:
            return ""
        try:
            size = self._log.seek(0, os.SEEK_END)
            self._log.seek(max(0, size - 20_000))
            text = self._log.read().decode(errors="replace")
        except (OSError, ValueError):
            return ""
        return "\n".join(text.replace("\0", "").splitlines()[-_SHOWN_LOG_LINES:])

    # The end -------------------------------------------------------------------------------------

    def kill(self) -> None:
        """End the worker and everything it started, at once."""
        worker = self._worker_process()
        self._close_descriptors()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_EXIT_WAIT_SECONDS)  # the guard ends all of them
        if self._process.returncode is None:
            for group in (worker, self._process.pid):
                if group is not None:
                    with contextlib.suppress(OSError):
                        os.killpg(group, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=_EXIT_WAIT_SECONDS)

    def _close_descriptors(self) -> None:
        for name in ("_lifeline", "_status"):
            descriptor = getattr(self, name, -1)
            setattr(self, name, -1)
            if descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        with contextlib.suppress(OSError):
            self._channel.close()
        if self._log is not None:
            with contextlib.suppress(OSError):
                self._log.close()

    def close(self) -> None:
        """Let the worker end by itself, then make sure of it."""
        with contextlib.suppress(OSError):
            self._channel.shutdown()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2)
        self.kill()


def _worker_environment() -> dict[str, str]:
    """Return the variables that keep workers quiet, and those that frameworks want."""
    environment = dict(_QUIET_ENVIRONMENT)
    for known in registry.all_capabilities().values():
        environment |= known.environment
    return environment


def _open_log() -> IO[bytes] | None:
    """Open a file for what the worker prints; None where none can be created."""
    import fcntl

    try:
        log = tempfile.TemporaryFile(prefix="autoprec-worker-")  # noqa: SIM115 - Worker closes it
    except OSError:
        return None
    flags = fcntl.fcntl(log, fcntl.F_GETFL)
    fcntl.fcntl(log, fcntl.F_SETFL, flags | os.O_APPEND)
    return log


def _exit_code(report: Mapping[str, Any], guard: int | None) -> int | None:
    """Return the worker's exit status in subprocess's convention; None if it still runs."""
    if "signal" in report:
        return -int(report["signal"])
    if "code" in report:
        return int(report["code"])
    return guard if guard else None  # the guard itself was killed, and the worker with it


def _without_autoprec_frames(printed: str) -> str:
    """Drop autoprec's own frames from the stacks that faulthandler printed."""
    package = str(Path(__file__).parents[1]) + os.sep
    return "\n".join(line for line in printed.splitlines() if f'File "{package}' not in line)


_SCRIPT = str(Path(__file__).with_name("server.py"))
_QUIET_ENVIRONMENT = {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
