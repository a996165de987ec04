"""The child side of a worker: run as a script by client.py, with its settings as one argument.

The user's code runs here, under a memory limit, in a process group of its own, with a guard process
above it (supervisor.py). Answers leave over a socket of their own, so nothing that the user's code
prints, reads or closes disturbs them; a process that it forks cannot answer in the worker's place.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

    from autoprec.workers.channel import Channel
    from autoprec.workers.memory_limit import MemoryLimit

_PROGRESS_INTERVAL_SECONDS = 0.1
_MAX_MESSAGE_CHARACTERS = 4_000
_MAX_FRAMES_CHARACTERS = 20_000
_MAX_MODULES = 64
_MIN_CHANNEL_DESCRIPTOR = 200

#: What sets colours and weights on a terminal; Keras puts them into its messages.
_ANSI_STYLES = re.compile(r"\x1b\[[0-9;]*m")


def main() -> None:
    """Serve calls until the channel closes."""
    _find_package()
    from autoprec.workers.supervisor import fork_under_guard

    settings = json.loads(sys.argv[1])
    channel = int(settings["channel"])
    fork_under_guard(
        tuner=settings["tuner"],
        lifeline=settings["lifeline"],
        status=settings["status"],
        others=(channel,),
        most_bytes=settings["most_bytes"],
    )
    _log_crash_frames()
    _prefer_as_oom_victim()
    from autoprec.workers.memory_limit import MemoryLimit  # not in the guard

    limit = MemoryLimit(settings["memory_bytes"])
    served = False
    with contextlib.suppress(KeyboardInterrupt):
        _Server(_open_channel(channel, bytes.fromhex(settings["token"])), limit).serve()
        served = True
    _exit_at_once(0 if served else 1)


def _find_package() -> None:
    """Make autoprec importable from a source tree, last on the path."""
    import importlib.util

    if importlib.util.find_spec("autoprec") is None:
        sys.path.append(str(Path(__file__).parents[2]))


def _open_channel(descriptor: int, token: bytes) -> Channel:
    """Open the channel on a high descriptor that children do not inherit."""
    from autoprec.workers.channel import Channel

    high = _to_high_descriptor(descriptor)
    channel = Channel(socket.socket(fileno=high), token)
    os.register_at_fork(after_in_child=channel.close)
    return channel


def _to_high_descriptor(descriptor: int) -> int:
    """Move a descriptor to a number that code counting up from 3 does not reach."""
    import fcntl

    try:
        high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _MIN_CHANNEL_DESCRIPTOR)
    except OSError:  # fewer descriptors are allowed than that
        os.set_inheritable(descriptor, False)
        return descriptor
    os.close(descriptor)
    return high


def _log_crash_frames() -> None:
    """Print the Python frames of a crash to the log; write no core file (they can be huge)."""
    import resource

    log = _to_high_descriptor(os.dup(2))
    faulthandler.enable(file=log)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, file=log)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _prefer_as_oom_victim() -> None:
    """Make this process the kernel's first choice should it run out of memory (proc(5))."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("800")


class _Reporter:
    """Sends progress, at most ten times a second unless the phase changes."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._phase = ""
        self._last = 0.0

    def reset(self) -> None:
        """Forget the phase, so that the next call's first one is reported in any case."""
        self._phase = ""

    def __call__(self, phase: str, step: int) -> None:
        now = time.monotonic()
        if phase == self._phase and now - self._last < _PROGRESS_INTERVAL_SECONDS:
            return
        self._phase, self._last = phase, now
        self._channel.send({"progress": [phase, step]})


class _Server:
    """Answers calls one after another, and goes on from any frame that it is called in."""

    def __init__(self, channel: Channel, limit: MemoryLimit) -> None:
        from autoprec.workers.handlers import Service

        self._channel, self._limit = channel, limit
        self._reporter = _Reporter(channel)
        self._service = Service(self._reporter, self.serve_here)
        self._method = ""

    def serve(self) -> None:
        """Serve calls until the channel closes."""
        from autoprec.workers.channel import ChannelClosed

        with contextlib.suppress(ChannelClosed):
            while True:
                request = self._channel.receive()
                self._limit.apply()
                self._reporter.reset()
                self._method = request["call"]
                self._send(_answer(self._service, request, self._limit))

    def serve_here(self, work: Callable[[], Any]) -> NoReturn:
        """Answer the call at hand with what `work` returns, serve on, and end the process.

        The frames below are a script's: neither a result nor an exception goes back to them.
        """
        code = 1
        try:
            self._send(_answer_with(work, self._limit))
            self.serve()
            code = 0
        finally:
            _exit_at_once(code)

    def _send(self, answer: dict[str, Any]) -> None:
        try:
            self._channel.send(answer)
        except ValueError as error:  # a number that JSON has no name for, or far too much
            self._channel.send(_internal_failure(f"{self._method} gave no message: {error}"))


def _answer(service: Any, request: dict[str, Any], limit: MemoryLimit) -> dict[str, Any]:
    from autoprec.core.codec import from_plain
    from autoprec.workers.handlers import type_hints_of

    method = request["call"]
    types = type_hints_of(method)

    def call() -> Any:
        arguments = {
            name: from_plain(types[name], value) for name, value in request["arguments"].items()
        }
        return getattr(service, method)(**arguments)

    return _answer_with(call, limit)


def _answer_with(work: Callable[[], Any], limit: MemoryLimit) -> dict[str, Any]:
    from autoprec.core.codec import to_plain

    try:
        return {"result": to_plain(work())}
    except BaseException as error:  # the user's code may raise anything, SystemExit included
        limit.make_room()
        return _describe_failure(error)


def _describe_failure(error: BaseException) -> dict[str, Any]:
    from autoprec.backends.shared.raising_modules import modules_raised_in
    from autoprec.errors import AutoprecError, DataError, UserCodeError
    from autoprec.workers.channel import ChannelClosed
    from autoprec.workers.failures import (
        FailureKind,
        add_advice,
        classify_data_error,
        classify_exception,
        describe_exception,
    )
    from autoprec.workers.task_file import raised_by_autoprec, user_frames

    if isinstance(error, ChannelClosed):
        raise error
    if isinstance(error, DataError):
        kind, cause = classify_data_error(error), error.__cause__ or error
        return _failure_answer(kind.value, add_advice(str(error)), user_frames(cause))
    if isinstance(error, UserCodeError):
        return _failure_answer(_import_failure_kind(error.__cause__), str(error), error.frames)
    if isinstance(error, AutoprecError):
        return _failure_answer("user_error", str(error), "")
    kind = classify_exception(error)
    message = add_advice(describe_exception(error))
    if isinstance(error, SystemExit):
        message = f"the task called sys.exit({error.code!r})"
    elif kind is FailureKind.USER_ERROR and raised_by_autoprec(error):
        return _failure_answer("internal", f"autoprec itself failed: {message}", user_frames(error))
    answer = _failure_answer(kind.value, message, user_frames(error))
    answer["failure"]["raised_in"] = list(modules_raised_in(error)[:_MAX_MODULES])
    return answer


def _import_failure_kind(cause: BaseException | None) -> str:
    """Classify what a task file raised at import; memory and a lost device are not its fault."""
    from autoprec.workers.failures import FailureKind, classify_exception

    kind = FailureKind.USER_ERROR if cause is None else classify_exception(cause)
    told_apart = kind in (FailureKind.OUT_OF_MEMORY, FailureKind.LOST_DEVICE)
    return (kind if told_apart else FailureKind.USER_ERROR).value


def _failure_answer(kind: str, message: str, frames: str) -> dict[str, Any]:
    return {
        "failure": {
            "kind": kind,
            "message": _ANSI_STYLES.sub("", message)[:_MAX_MESSAGE_CHARACTERS],
            "frames": _ANSI_STYLES.sub("", frames)[-_MAX_FRAMES_CHARACTERS:],
        }
    }


def _internal_failure(message: str) -> dict[str, Any]:
    return _failure_answer("internal", f"autoprec itself failed: {message}", "")


def _exit_at_once(code: int) -> NoReturn:
    """End at once, without waiting for threads that the user's code left running."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
