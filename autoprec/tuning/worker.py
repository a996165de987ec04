"""The child side of a worker: `python -m autoprec.tuning.worker`, started by `remote`.

The user's code runs here, under a memory limit, in a session and process group of its own. A guard
process in that group waits on a pipe that only the tuner holds: when the tuner ends, however it
ends, the pipe closes and the guard kills the whole group. Answers leave over a socket of their own,
so nothing the user's code prints or closes disturbs them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from typing import Any

REPORT_SECONDS = 0.1


def main() -> None:
    """Serve calls until the channel closes."""
    settings = json.loads(sys.argv[1])
    channel_fd, lifeline_fd = int(settings["channel"]), int(settings["lifeline"])
    _start_guard(channel_fd, lifeline_fd)
    channel = socket.socket(fileno=channel_fd)
    os.set_inheritable(channel_fd, False)
    _limit_memory(settings.get("memory_bytes"))
    with contextlib.suppress(KeyboardInterrupt):
        _serve(channel)


def _start_guard(channel_fd: int, lifeline_fd: int) -> None:
    """Fork the process that kills this group when the tuner is gone."""
    if os.fork() != 0:
        os.close(lifeline_fd)
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.close(channel_fd)
    with contextlib.suppress(OSError):
        while os.read(lifeline_fd, 1):
            pass
    os.killpg(0, signal.SIGKILL)


def _limit_memory(limit: int | None) -> None:
    """Make too much memory an exception here, not the kernel's killer (Linux: RLIMIT_DATA)."""
    if limit is None or not sys.platform.startswith("linux"):
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


class _Reporter:
    """Sends progress, at most ten times a second unless the phase changes."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._phase = ""
        self._last = 0.0

    def __call__(self, phase: str, step: int) -> None:
        from autoprec.tuning.messages import send

        now = time.monotonic()
        if phase == self._phase and now - self._last < REPORT_SECONDS:
            return
        self._phase, self._last = phase, now
        send(self._channel, {"progress": [phase, step]})


def _serve(channel: socket.socket) -> None:
    from autoprec.tuning.messages import ChannelClosed, receive, send
    from autoprec.tuning.service import Service

    service = Service(_Reporter(channel))
    try:
        while True:
            request = receive(channel)
            send(channel, _answer(service, request))
    except ChannelClosed:
        return


def _answer(service: Any, request: dict[str, Any]) -> dict[str, Any]:
    from autoprec.core.codec import from_plain, to_plain
    from autoprec.tuning.service import hints

    method = request["call"]
    types = hints(method)
    try:
        arguments = {
            name: from_plain(types[name], value) for name, value in request["arguments"].items()
        }
        return {"result": to_plain(getattr(service, method)(**arguments))}
    except BaseException as error:  # the user's code may raise anything, SystemExit included
        return {"failure": _failure(error)}


def _failure(error: BaseException) -> dict[str, str]:
    from autoprec.errors import AutoprecError, UserCodeError
    from autoprec.tuning.failures import FailureKind, classify_exception
    from autoprec.tuning.messages import ChannelClosed
    from autoprec.tuning.taskfile import user_frames

    if isinstance(error, ChannelClosed):
        raise error
    if isinstance(error, UserCodeError):
        return {"kind": "user_error", "message": str(error), "frames": error.frames}
    if isinstance(error, AutoprecError):
        return {"kind": "user_error", "message": str(error), "frames": ""}
    kind = classify_exception(error)
    if isinstance(error, SystemExit):
        message = f"the task called sys.exit({error.code!r})"
    else:
        message = f"{type(error).__name__}: {error}"
    frames = user_frames(error) if kind is FailureKind.USER_ERROR else ""
    return {"kind": kind.value, "message": message[:4000], "frames": frames}


if __name__ == "__main__":
    main()
