"""A worker that is no process: for tasks that are simulated, and cannot crash.

Arguments, answers and failures become messages and are read again, as between processes; only the
processes, their channel and their limits are missing.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import RLock
from typing import Any

from autoprec.backends.protocol import ProgressCallback
from autoprec.core.codec import to_plain
from autoprec.workers import server
from autoprec.workers.client import Worker, WorkerSettings
from autoprec.workers.handlers import LoadedTask, Service
from autoprec.workers.memory_limit import MemoryLimit

#: An interpreter has one list of folders to import from, and one module of a name.
_LOADING = RLock()


class _Service(Service):
    def discard_traces(self) -> None:
        """Drop the tracer; collecting garbage would take long, and give back next to nothing."""
        self._tracers.clear()


class InProcessWorker(Worker):
    """A worker that makes a call where its answer is waited for."""

    alive = True
    pids = (os.getpid(),)

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.loaded: LoadedTask | None = None
        self._on_progress: ProgressCallback | None = None
        self._service = _Service(self._tell)
        self._request = ""
        self._interrupt: BaseException | None = None

    def begin(self, method: str, **arguments: Any) -> None:
        """Keep a call, which `poll` makes."""
        self._method, self._phase = method, "start"
        plain = {name: to_plain(value) for name, value in arguments.items()}
        self._request = _message({"call": method, "arguments": plain})

    def poll(
        self, on_progress: ProgressCallback | None, *, wait: bool = False
    ) -> dict[str, Any] | None:
        """Make the call; return its answer."""
        self._on_progress = on_progress
        if self._method == "load":
            with _LOADING, _module_of_its_own(self.settings.task.path.stem):
                answer = self._answer()
        else:
            answer = self._answer()
        if self._interrupt is not None:
            raise self._interrupt
        return answer

    def fileno(self) -> int:
        """Return no descriptor: no answer has to arrive."""
        return -1

    def kill(self) -> None:
        """Leave the rest to the garbage collector."""

    release = shut_down = close = kill

    def _answer(self) -> dict[str, Any]:
        request = json.loads(self._request)
        with _environment_of_its_own(self.settings.environment):
            answer = server._answer(self._service, request, MemoryLimit(None))
        sent: dict[str, Any] = json.loads(_message(answer))
        return sent

    def _tell(self, phase: str, step: int) -> None:
        self._phase = phase
        if self._on_progress is not None:
            try:
                self._on_progress(phase, step)
            except BaseException as interrupt:  # raised on the tuner's side, not by the task
                self._interrupt = interrupt
                raise


@contextmanager
def _environment_of_its_own(given: Mapping[str, str]) -> Iterator[None]:
    """Add variables; afterwards set back what has changed, and nothing else: each one costs."""
    before = os.environ.copy()
    os.environ.update(given)
    try:
        yield
    finally:
        after = os.environ.copy()
        for name in after.keys() - before.keys():
            del os.environ[name]
        os.environ.update({n: value for n, value in before.items() if after.get(n) != value})


def _message(content: dict[str, Any]) -> str:
    return json.dumps(content, allow_nan=False)


@contextmanager
def _module_of_its_own(name: str) -> Iterator[None]:
    """Let a task be loaded, and forget its module, so that another worker can load it."""
    arguments, folders = sys.argv, sys.path.copy()
    try:
        yield
    finally:
        sys.argv, sys.path[:] = arguments, folders
        sys.modules.pop(name, None)
