"""The child side of a worker: run as a script by `remote`, with its settings as one argument.

The user's code runs here, under a memory limit, in a process group of its own, with a guard process
above it (see `guard`). Answers leave over a socket of their own, so nothing that the user's code
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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autoprec.workers.channel import Channel

_REPORT_SECONDS = 0.1
_LONGEST_MESSAGE = 4_000
_LONGEST_FRAMES = 20_000
_HIGH_DESCRIPTOR = 200

#: What sets colours and weights on a terminal; Keras puts them into its messages.
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def main() -> None:
    """Serve calls until the channel closes."""
    _find_package()
    from autoprec.workers.supervisor import stand_guard

    settings = json.loads(sys.argv[1])
    channel = int(settings["channel"])
    stand_guard(
        tuner=settings["tuner"],
        lifeline=settings["lifeline"],
        status=settings["status"],
        others=(channel,),
        watch_bytes=settings["watch_bytes"],
    )
    _show_where_it_dies()
    _be_the_first_to_go()
    limit = _MemoryLimit(settings["memory_bytes"])
    served = False
    with contextlib.suppress(KeyboardInterrupt):
        _serve(_open_channel(channel, bytes.fromhex(settings["token"])), limit)
        served = True
    _leave(0 if served else 1)


def _find_package() -> None:
    """Make autoprec importable from a source tree, last on the path."""
    import importlib.util

    if importlib.util.find_spec("autoprec") is None:
        sys.path.append(str(Path(__file__).parents[2]))


def _open_channel(descriptor: int, token: bytes) -> Channel:
    """Open the channel on a high descriptor that children do not inherit."""
    from autoprec.workers.channel import Channel

    high = _move_up(descriptor)
    channel = Channel(socket.socket(fileno=high), token)
    os.register_at_fork(after_in_child=channel.close)
    return channel


def _move_up(descriptor: int) -> int:
    """Move a descriptor to a number that code counting up from 3 does not reach."""
    import fcntl

    try:
        high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _HIGH_DESCRIPTOR)
    except OSError:  # fewer descriptors are allowed than that
        os.set_inheritable(descriptor, False)
        return descriptor
    os.close(descriptor)
    return high


def _show_where_it_dies() -> None:
    """Print the Python frames of a crash to the log; write no core file (they can be huge)."""
    import resource

    log = _move_up(os.dup(2))
    faulthandler.enable(file=log)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, file=log)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _be_the_first_to_go() -> None:
    """Make this process the kernel's first choice should it run out of memory (proc(5))."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("800")


_TO_TELL_BYTES = 64 * 2**20
"""What saying that memory ran out may take beyond the limit."""


class _MemoryLimit:
    """Makes too much memory an exception here, not the kernel's killer (Linux: RLIMIT_DATA)."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit if sys.platform.startswith("linux") else None

    def apply(self) -> None:
        """Set the limit, less what is resident but not counted by it: libraries, shared memory."""
        if self._limit is None:
            return
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        soft = max(self._limit - _not_counted(), self._limit // 4)
        if hard != resource.RLIM_INFINITY:
            soft = min(soft, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    def ease(self) -> None:
        """Raise the limit to leave room for an error report, until it is applied again."""
        if self._limit is None:
            return
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        more = soft + _TO_TELL_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (min(more, hard) if hard >= 0 else more, hard))


def _not_counted() -> int:
    total = 0
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(("RssFile:", "RssShmem:")):
                total += int(line.split()[1]) * 1024
    return total


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
        if phase == self._phase and now - self._last < _REPORT_SECONDS:
            return
        self._phase, self._last = phase, now
        self._channel.send({"progress": [phase, step]})


def _serve(channel: Channel, limit: _MemoryLimit) -> None:
    from autoprec.workers.channel import ChannelClosed
    from autoprec.workers.handlers import Service

    reporter = _Reporter(channel)
    service = Service(reporter)
    try:
        while True:
            request = channel.receive()
            limit.apply()
            reporter.reset()
            answer = _answer(service, request, limit)
            try:
                channel.send(answer)
            except ValueError as error:  # a number that JSON has no name for, or far too much
                channel.send(_internal(f"{request['call']} gave no message: {error}"))
    except ChannelClosed:
        return


def _answer(service: Any, request: dict[str, Any], limit: _MemoryLimit) -> dict[str, Any]:
    from autoprec.core.codec import from_plain, to_plain
    from autoprec.workers.handlers import hints

    method = request["call"]
    types = hints(method)
    try:
        arguments = {
            name: from_plain(types[name], value) for name, value in request["arguments"].items()
        }
        return {"result": to_plain(getattr(service, method)(**arguments))}
    except BaseException as error:  # the user's code may raise anything, SystemExit included
        limit.ease()
        return _failure(error)


def _failure(error: BaseException) -> dict[str, Any]:
    from autoprec.errors import AutoprecError, UserCodeError
    from autoprec.workers.channel import ChannelClosed
    from autoprec.workers.failures import (
        FailureKind,
        classify_exception,
        describe_exception,
        with_advice,
    )
    from autoprec.workers.task_file import is_ours, user_frames

    if isinstance(error, ChannelClosed):
        raise error
    if isinstance(error, UserCodeError):
        return _failed(_kind_of_import(error.__cause__), str(error), error.frames)
    if isinstance(error, AutoprecError):
        return _failed("user_error", str(error), "")
    kind = classify_exception(error)
    message = with_advice(describe_exception(error))
    if isinstance(error, SystemExit):
        message = f"the task called sys.exit({error.code!r})"
    elif kind is FailureKind.USER_ERROR and is_ours(error):
        return _failed("internal", f"autoprec itself failed: {message}", user_frames(error))
    return _failed(kind.value, message, user_frames(error))


def _kind_of_import(cause: BaseException | None) -> str:
    """Classify what a task file raised at import; memory and a lost device are not its fault."""
    from autoprec.workers.failures import FailureKind, classify_exception

    kind = FailureKind.USER_ERROR if cause is None else classify_exception(cause)
    told_apart = kind in (FailureKind.OUT_OF_MEMORY, FailureKind.LOST_DEVICE)
    return (kind if told_apart else FailureKind.USER_ERROR).value


def _failed(kind: str, message: str, frames: str) -> dict[str, Any]:
    return {
        "failure": {
            "kind": kind,
            "message": _COLOURS.sub("", message)[:_LONGEST_MESSAGE],
            "frames": _COLOURS.sub("", frames)[-_LONGEST_FRAMES:],
        }
    }


def _internal(message: str) -> dict[str, Any]:
    return _failed("internal", f"autoprec itself failed: {message}", "")


def _leave(code: int) -> None:
    """End at once, without waiting for threads that the user's code left running."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
