"""Worker processes that are forked from one that has imported their framework already.

A worker of a tuning imports its framework anew, which for torch takes three seconds, and the tests
start some hundreds of workers. With `forked_workers` they are forked from a server process that has
only imported modules: real processes, with a guard, a memory limit and an end of their own, that
lack nothing but the time of the import.

A worker whose environment differs from the server's in what is read at import (threads, paths,
devices) is started as users start it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.processes import MARK, name_of

#: What may differ between the server's environment and a worker's: nothing reads it at import.
_FREE = {"AUTOPREC", "TMPDIR", "HOME", "COLUMNS", "PYTEST_CURRENT_TEST", "PYTHONUNBUFFERED"}
_FREE |= {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
#: Read when a device is first used, or by what only a training script imports.
_FREE |= {"CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "TF_FORCE_GPU_ALLOW_GROWTH"}
_FREE |= {"WANDB_MODE", "MLFLOW_TRACKING_URI", "DISABLE_MLFLOW_INTEGRATION", "MPLBACKEND"}
_FREE_PREFIXES = ("AUTOPREC_", "TOKENIZERS_", "HF_")

_POLL_SECONDS = 0.01
PYTHON = sys.executable


class ForkServer:
    """The client's side of one server process, which is started with the first worker.

    It has imported the `modules`, under the environment of a worker that is given `more`; without
    modules it is forked from this process as it is then.
    """

    def __init__(self, modules: Sequence[str] = (), more: Mapping[str, str] | None = None) -> None:
        self.modules = tuple(modules)
        self._more = dict(more or {})
        self._environment: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | _Fork | None = None
        self._socket: socket.socket | None = None

    def can_start(self, environment: dict[str, str]) -> bool:
        """Return whether a process with this environment may be forked."""
        mine = self._environment or worker_environment(self._more)
        names = {n for n in {*mine, *environment} if mine.get(n) != environment.get(n)}
        return all(name in _FREE or name.startswith(_FREE_PREFIXES) for name in names)

    def popen(self, command: Sequence[str], **settings: Any) -> ForkedProcess:
        """Do what `subprocess.Popen` would with the command of a worker or of a script's run."""
        null = os.open(os.devnull, os.O_RDWR)
        stdout, passed = settings["stdout"], list(settings.get("pass_fds", ()))
        output = null if stdout == subprocess.DEVNULL else stdout.fileno()
        request = {
            "arguments": command[-2:],
            "environment": settings["env"],
            "folder": os.getcwd(),
            "numbers": passed,
        }
        try:
            return self._fork(request, [null, output, output, *passed])
        finally:
            os.close(null)

    def run(
        self,
        script: Path,
        *arguments: object,
        seconds: float = 240.0,
        environment: Mapping[str, str] = os.environ,
        folder: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a Python file in a folder (the current one), as `python FILE ...` would.

        Nothing of the `environment` may be read at import that differs from the server's. What
        takes longer than `seconds` is asked for its stack, and is an AssertionError.
        """
        words = [str(script), *map(str, arguments)]
        request = {
            "arguments": words,
            "environment": dict(environment),
            "folder": str(folder or os.getcwd()),
            "numbers": [],
            "path": str(script.parent),
        }
        with (
            open(os.devnull, "rb") as null,
            tempfile.TemporaryFile("w+") as out,
            tempfile.TemporaryFile("w+") as errors,
        ):
            child = self._fork(request, [each.fileno() for each in (null, out, errors)])
            code = None
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = child.wait(seconds)
                if code is None:
                    child.send_signal(signal.SIGABRT)
                    child.wait(30.0)
            finally:
                child.kill()
            out.seek(0)
            errors.seek(0)
            said = out.read(), errors.read()
            if code is None:
                raise AssertionError("\n".join((f"still running after {seconds:g} s:", *said)))
            return subprocess.CompletedProcess(words, code, *said)

    def _fork(self, request: dict[str, Any], descriptors: list[int]) -> ForkedProcess:
        """Fork a process whose descriptors 0, 1, 2 and those of `numbers` are these."""
        if self._socket is None:
            self._start()
        assert self._socket is not None
        ours, theirs = socket.socketpair()
        with theirs:
            given = [theirs.fileno(), *descriptors]
            socket.send_fds(self._socket, [json.dumps(request).encode()], given)
        return ForkedProcess(ours)

    @property
    def pid(self) -> int:
        """Return the process id of the server: the parent of all that it forks."""
        if self._process is None:
            self._start()
        assert self._process is not None
        return self._process.pid

    def processor_seconds(self) -> float:
        """Return the processor time of the server and of what it forked and saw end, in seconds."""
        stat = Path(f"/proc/{self._process.pid if self._process else None}/stat")
        if not stat.exists():
            return 0.0
        words = stat.read_text().rpartition(")")[2].split()
        return sum(map(int, words[11:15])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """End the server; workers end by their own guards."""
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            self._process.terminate()  # what a test left running may hold the socket open
            self._process.wait()
        self._socket = self._process = None

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._environment = worker_environment(self._more)
        self._process = (
            subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno()), *self.modules],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=self._environment,
            )
            if self.modules
            else _Fork(ours, theirs)
        )
        theirs.close()
        self._socket = ours


class _Fork:
    """What of `subprocess.Popen` a server needs that is forked from this process."""

    def __init__(self, client: socket.socket, requests: socket.socket) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            try:
                client.close()
                serve(requests, ())
            finally:
                os._exit(1)

    def terminate(self) -> None:
        """Ask it to end."""
        os.kill(self.pid, signal.SIGTERM)

    def wait(self) -> None:
        """Wait for its end."""
        os.waitpid(self.pid, 0)


class ForkedProcess:
    """What of `subprocess.Popen` the workers' client uses, for a child of the server."""

    def __init__(self, report: socket.socket) -> None:
        self._report = report
        self.returncode: int | None = None
        self.pid = int(self._line() or 0)

    def poll(self) -> int | None:
        """Return how the process ended; None while it runs."""
        if self.returncode is None and select.select([self._report], [], [], 0)[0]:
            self.returncode = int(self._line() or -signal.SIGKILL)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end."""
        until = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired("a forked worker", timeout or 0.0)
            select.select([self._report], [], [], _POLL_SECONDS)
        self._report.close()
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def _line(self) -> bytes:
        """Read a line of the server's; nothing where the server is gone."""
        line = b""
        while not line.endswith(b"\n"):
            byte = self._report.recv(1)
            if not byte:
                return b""
            line += byte
        return line


def worker_environment(more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a worker that is given `more` than its tuner's."""
    from autoprec.workers.environment import worker_environment

    return worker_environment(more)


@contextlib.contextmanager
def forked_workers(server: ForkServer) -> Iterator[None]:
    """Let the workers that are started in this process be forked from `server`."""
    from autoprec.workers import client

    with forked_from(server, client):
        yield


@contextlib.contextmanager
def forked_from(server: ForkServer, module: ModuleType) -> Iterator[None]:
    """Let what the code of a module starts by `subprocess.Popen` be forked from `server`."""

    class Starter:
        """Stands for `subprocess` in the module."""

        DEVNULL, STDOUT = subprocess.DEVNULL, subprocess.STDOUT
        SubprocessError, TimeoutExpired = subprocess.SubprocessError, subprocess.TimeoutExpired

        @staticmethod
        def Popen(command: list[str], **settings: Any) -> Any:
            if command[0] != PYTHON or not server.can_start(settings["env"]):
                return subprocess.Popen(command, **settings)
            arguments = json.loads(command[-1]) | {"tuner": server.pid}
            return server.popen([*command[:-1], json.dumps(arguments)], **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "subprocess", Starter)
        yield


# -- the server's side ----------------------------------------------------------------------------


def serve(requests: socket.socket, modules: Sequence[str]) -> None:
    """Import the modules, then fork a process for every request until the other side closes.

    Of a package of autoprec all modules are imported.
    """
    import gc
    import importlib
    import pkgutil

    for name in modules:
        module = importlib.import_module(name)
        own = module.__path__ if name.startswith("autoprec.") else ()
        for found in pkgutil.walk_packages(own, f"{name}."):
            importlib.import_module(found.name)
    gc.collect()
    gc.freeze()
    running: dict[int, socket.socket] = {}
    wake, tell = os.pipe()
    os.set_blocking(tell, False)
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    while True:
        readable, _, _ = select.select([requests, wake], [], [])
        if wake in readable:
            with contextlib.suppress(OSError):
                os.read(wake, 4096)
            _report_ends(running)
        if requests not in readable:
            continue
        message, descriptors, _, _ = socket.recv_fds(requests, 2**20, 16)
        if not message:
            return
        report = socket.socket(fileno=descriptors[0])
        child = os.fork()
        if child == 0:
            signal.set_wakeup_fd(-1)
            _become(json.loads(message), descriptors)
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        running[child] = report
        report.sendall(b"%d\n" % child)


def _report_ends(running: dict[int, socket.socket]) -> None:
    while True:
        try:
            child, how = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if child == 0:
            return
        report = running.pop(child)
        with contextlib.suppress(OSError):
            report.sendall(b"%d\n" % os.waitstatus_to_exitcode(how))
        report.close()


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Turn the forked process into the one that was asked for; never return."""
    import random
    import runpy

    code = 1
    try:
        _take_descriptors(descriptors, request["numbers"])
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        if mark := os.environ.get(MARK):
            with contextlib.suppress(OSError):  # where there is no /proc
                Path("/proc/self/comm").write_text(name_of(mark))
        random.seed()
        sys.argv = request["arguments"]
        sys.path[:0] = [request["path"]] if "path" in request else []
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)
    except BaseException:  # it must not go on as the server
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _take_descriptors(received: list[int], numbers: list[int]) -> None:
    """Put stdin, stdout, stderr and what was passed where they are expected; close all others."""
    targets, sources = [0, 1, 2, *numbers], received[1:]
    room = max(*targets, *sources) + 1
    high = [os.dup2(source, room + place) for place, source in enumerate(sources)]
    os.closerange(3, room)
    for source, target in zip(high, targets, strict=True):
        os.dup2(source, target)
    kept = set(targets)
    for number in range(3, room + len(high)):
        if number not in kept:
            with contextlib.suppress(OSError):
                os.close(number)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
