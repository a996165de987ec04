"""The parent side of a worker: starts it, calls it, times it, and ends it.

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

from autoprec.backends.protocol import Engine, ProgressCallback, RankPlace
from autoprec.core.codec import from_plain, to_plain
from autoprec.errors import UsageError
from autoprec.workers import memory_limit
from autoprec.workers.channel import TOKEN_BYTES, Channel, ChannelClosed
from autoprec.workers.environment import worker_environment
from autoprec.workers.failures import (
    FailureKind,
    WorkerFailure,
    explain_exit,
)
from autoprec.workers.handlers import LoadedTask, type_hints_of
from autoprec.workers.task_source import TaskSource
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
    of `checkpoint`, if one is given. Sessions look at `surveyed` batches; see `TaskFacts`.
    `nproc` ranks train together, sharing each step by `engine`, and `place` is this worker's among
    them; `memory_bytes` is what each of them may have.
    """

    task: TaskSource
    device: str = "cpu"
    checkpoint: Path | None = None
    memory_bytes: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    step_seconds: float = FIRST_STEP_TIMEOUT_SECONDS
    nproc: int = 1
    engine: Engine = "ddp"
    place: RankPlace | None = None
    surveyed: int | None = None

    def guard_bytes(self) -> int | None:
        """Return the main memory at which the guard ends the worker; None if unknown."""
        if self.memory_bytes is not None:
            return self.memory_bytes + memory_limit.ERROR_REPORT_BYTES  # at its own it says so
        left = memory_limit.memory_budget(memory_limit.free_main_memory())
        return None if left is None else left // self.nproc


class Worker:
    """One worker process that has the task loaded, and its guard."""

    def __init__(self, settings: WorkerSettings) -> None:
        if os.name != "posix":
            raise UsageError("tuning needs Linux or macOS; probe and apply_profile work here")
        self.settings = settings
        self.loaded: LoadedTask | None = None
        self._patience = patience_factor()
        self._method, self._phase = "", "start"
        self._since = time.monotonic()
        self._slowest_step, self._guard_output = 0.0, b""
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
                "most_bytes": settings.guard_bytes(),
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
                    env=worker_environment(settings.environment, scripts=not settings.task.plain),
                )
            except BaseException:
                self._close_descriptors()
                raise

    @property
    def pid(self) -> int:
        """Return the worker's process id; its guard's until the worker has reported its own."""
        return self._worker_process() or self._process.pid

    @property
    def pids(self) -> tuple[int, ...]:
        """Return the process ids of all that train: this worker's."""
        return (self.pid,)

    @property
    def alive(self) -> bool:
        """Return whether the process still runs."""
        return self._process.poll() is None

    def load(self, on_progress: ProgressCallback | None = None) -> LoadedTask:
        """Load the task, once."""
        if self.loaded is None:
            self.loaded = self.call("load", on_progress=on_progress, **self.load_arguments())
        return self.loaded

    def load_arguments(self) -> dict[str, Any]:
        """Return what this worker's `Service` needs to load the task."""
        checkpoint = self.settings.checkpoint
        return {
            "source": self.settings.task,
            "device": self.settings.device,
            "checkpoint": None if checkpoint is None else str(checkpoint),
            "place": self.settings.place,
        }

    def call(
        self, method: str, *, on_progress: ProgressCallback | None = None, **arguments: Any
    ) -> Any:
        """Call a method of `Service` and wait; `WorkerFailure` if it or the worker fails."""
        try:
            self.begin(method, **arguments)
            while (answer := self.poll(on_progress, wait=True)) is None:
                pass
        except BaseException:
            self.kill()
            raise
        return self.result_of(answer)

    # The parts of a call, for whoever waits for several workers at once

    def begin(self, method: str, **arguments: Any) -> None:
        """Send a call, whose answer `poll` returns."""
        self._method, self._phase = method, _FIRST_PHASE_OF.get(method, "start")
        try:
            self._channel.send(
                {"call": method, "arguments": {k: to_plain(v) for k, v in arguments.items()}},
            )
        except ChannelClosed:
            raise self._death_failure() from None
        self._since = time.monotonic()

    def poll(
        self, on_progress: ProgressCallback | None, *, wait: bool = False
    ) -> dict[str, Any] | None:
        """Return the answer; None if it has not arrived, which `wait` waits for.

        Raises `WorkerFailure` if the worker has died, or made no progress for too long.
        """
        while True:
            try:
                message = self._channel.receive(max(0.0, self.seconds_left()) if wait else 0.0)
            except TimeoutError:
                if self.seconds_left() > 0:
                    return None
                raise self._timeout_failure(self._allowance()) from None
            except ChannelClosed:
                raise self._death_failure() from None
            if "progress" not in message:
                return message
            phase, step = message["progress"]
            self._note_progress(str(phase), int(step), on_progress)

    def result_of(self, answer: Mapping[str, Any]) -> Any:
        """Return the result in the answer to the last call; raise the failure that it may hold."""
        if "failure" in answer:
            failure = answer["failure"]
            raise WorkerFailure(
                FailureKind(failure["kind"]),
                failure["message"],
                frames=failure.get("frames", ""),
                phase=self._phase,
                raised_in=tuple(failure.get("raised_in", ())),
            )
        return from_plain(type_hints_of(self._method)["return"], answer["result"])

    def fileno(self) -> int:
        """Return the descriptor that answers arrive on; -1 after the end."""
        return self._channel.fileno()

    def seconds_left(self) -> float:
        """Return the seconds that the worker may still go on without progress."""
        return self._since + self._allowance() - time.monotonic()

    def _note_progress(self, phase: str, step: int, on_progress: ProgressCallback | None) -> None:
        now = time.monotonic()
        if phase == self._phase == "steps":
            self._slowest_step = max(self._slowest_step, now - self._since)
        self._phase, self._since = phase, now
        if on_progress is not None:
            on_progress(phase, step)

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
        code, over = _exit_code(report, guard), str(report.get("memory", ""))
        kind, message = explain_exit(code, printed, self._phase, over)
        frames = "" if over else _without_autoprec_frames(printed)
        return WorkerFailure(kind, message, frames=frames, phase=self._phase)

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

    def release(self) -> None:
        """Tell the guard to end the worker and everything it started; `kill` waits for that."""
        self._worker_process()  # whose id is not told later
        self._close_descriptors()

    def kill(self) -> None:
        """End the worker and everything it started, at once."""
        self.release()
        worker = self._worker_process()
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

    def shut_down(self) -> None:
        """Tell the worker to end by itself; `close` makes sure of it."""
        with contextlib.suppress(OSError):
            self._channel.shutdown()

    def close(self) -> None:
        """Let the worker end by itself, then make sure of it."""
        self.shut_down()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=2)
        self.kill()


def _open_log() -> IO[bytes] | None:
    """Open a file for what the worker prints; None if none can be created."""
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
    left = [f'File "{Path(__file__).parents[1]}{os.sep}', 'File "<frozen ']
    lines = printed.splitlines()
    return "\n".join(line for line in lines if not any(each in line for each in left))


_SCRIPT = str(Path(__file__).with_name("server.py"))
