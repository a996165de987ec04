"""Nothing that a task does in its worker disturbs the tuner: every fault is committed for real."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from processes import MARK, survivors

from autoprec.core.recipe import Recipe
from autoprec.core.speed.timing_budget import TimingBudget
from autoprec.workers import client, timeouts
from autoprec.workers.failures import FailureKind, WorkerFailure

pytestmark = pytest.mark.slow

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux's /proc")

# What the worker shrugs off: the answers come all the same, and they are right.
HARMLESS = {
    "prints": "print('x' * 100_000)",
    "prints what looks like a message": "print('{\"result\": null}')",
    "prints binary": "import os; os.write(1, bytes(range(256)) * 100)",
    "changes directory": "import os; os.chdir('/')",
    "closes stdout": "import sys; sys.stdout.close()",
    "closes descriptors 0 to 2": "import os; os.closerange(0, 3)",
    "closes descriptors 3 to 99, like a daemon": "import os; os.closerange(3, 100)",
    "replaces stdout by nothing": "import sys; sys.stdout = sys.stderr = None",
    "reads stdin": "import sys; assert sys.stdin.read() == ''",
    "installs signal handlers": """
        import signal
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        """,
    "writes on every descriptor": """
        import os
        for number in range(3, 1024):
            try:
                os.write(number, b'noise' * 10)
            except OSError:
                pass
        """,
    "leaves threads running": """
        import threading, time
        for _ in range(5):
            threading.Thread(target=time.sleep, args=(3600,)).start()
        """,
    "leaves a busy thread": """
        import threading
        def spin():
            while True:
                pass
        threading.Thread(target=spin, daemon=True).start()
        """,
    "leaves a child running": "import subprocess; subprocess.Popen(['sleep', '3600'])",
    "leaves a child in its own session": """
        import subprocess
        subprocess.Popen(['sleep', '3600'], start_new_session=True)
        """,
    "leaves a daemon": """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(3600)
            os._exit(0)
        """,
    "waits for all its children": """
        import os
        try:
            os.wait()
        except ChildProcessError:
            pass
        """,
    "forks a child that comes back": """
        import os
        os.fork()
        """,
    "sends a signal to its group": """
        import os, signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
        """,
    "lowers its own limits": """
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
        """,
    "has an exit handler that hangs": "import atexit, time; atexit.register(time.sleep, 3600)",
    "sets another locale": "import locale; locale.setlocale(locale.LC_ALL, 'C')",
    "empties the environment": "import os; os.environ.clear()",
    "turns the collector off": "import gc; gc.disable()",
    "sets a recursion limit": "import sys; sys.setrecursionlimit(150)",
}


@linux
@pytest.mark.parametrize("fault", HARMLESS.values(), ids=HARMLESS)
def test_the_answers_come_all_the_same(fault: str, write_task, start) -> None:
    worker = start(write_task(fault))
    assert worker.load().framework == "simulated"
    measured = worker.call("measure", recipe=Recipe(), seed=0, budget=TimingBudget())
    assert measured.samples_per_step == 32
    began = time.monotonic()
    worker.close()
    assert not worker.alive
    assert time.monotonic() - began < 30


def test_modules_in_the_current_folder_are_not_the_workers(
    write_task, start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in ("random", "json", "socket", "selectors"):
        (elsewhere / f"{name}.py").write_text("raise RuntimeError('not this one')")
    monkeypatch.chdir(elsewhere)
    assert start(write_task()).load().framework == "simulated"


# What ends the call, and how it is told.
FATAL = {
    "raises": ("raise ValueError('mine')", FailureKind.USER_ERROR, "ValueError: mine"),
    "exits": ("import sys; sys.exit(3)", FailureKind.USER_ERROR, "sys.exit(3)"),
    "raises KeyboardInterrupt": (
        "raise KeyboardInterrupt",
        FailureKind.USER_ERROR,
        "KeyboardInterrupt",
    ),
    "raises something mute": (
        """
        class Mute(Exception):
            def __str__(self):
                raise RuntimeError
        raise Mute
        """,
        FailureKind.USER_ERROR,
        "Mute",
    ),
    "recurses": ("def f(): f()\nf()", FailureKind.USER_ERROR, "RecursionError"),
    "asks for too much": ("bytearray(1 << 60)", FailureKind.OUT_OF_MEMORY, "MemoryError"),
    "leaves at once": ("import os; os._exit(7)", FailureKind.EXITED, "code 7"),
    "leaves like a killed shell": ("import os; os._exit(137)", FailureKind.EXITED, "code 137"),
    "is killed": (
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        FailureKind.KILLED,
        "SIGKILL",
    ),
    "kills its group": (
        "import os, signal; os.killpg(0, signal.SIGKILL)",
        FailureKind.KILLED,
        "SIGKILL",
    ),
    "kills its guard": (
        "import os, signal, time; os.kill(os.getppid(), signal.SIGKILL); time.sleep(3600)",
        FailureKind.KILLED,
        "SIGKILL",
    ),
    "crashes": (
        "import ctypes; ctypes.string_at(0)",
        FailureKind.SEGFAULT,
        "SIGSEGV",
    ),
    "aborts": ("import os; os.abort()", FailureKind.SEGFAULT, "SIGABRT"),
    "meets an illegal instruction": (
        "import os, signal; os.kill(os.getpid(), signal.SIGILL)",
        FailureKind.ILLEGAL_INSTRUCTION,
        "SIGILL",
    ),
    "closes every descriptor": (
        "import os; os.closerange(3, 1 << 16)",
        FailureKind.EXITED,
        "",
    ),
    "divides by nothing in NumPy's way": (
        "raise FloatingPointError('invalid value')",
        FailureKind.NONFINITE,
        "FloatingPointError",
    ),
}


@linux
@pytest.mark.parametrize(("fault", "kind", "said"), FATAL.values(), ids=FATAL)
def test_an_end_is_told_apart(fault: str, kind: FailureKind, said: str, write_task, start) -> None:
    worker = start(write_task(fault))
    with pytest.raises(WorkerFailure) as info:
        worker.load()
    assert info.value.kind == kind
    assert said in info.value.message
    assert "autoprec/tuning" not in info.value.frames


def test_a_crash_shows_the_users_frames(write_task, start) -> None:
    task = write_task("import ctypes; ctypes.string_at(0)")
    with pytest.raises(WorkerFailure) as info:
        start(task).load()
    assert f'File "{task}", line' in info.value.frames


def test_an_exception_shows_the_users_frames_and_not_ours(write_task, start) -> None:
    head = "def inner():\n    return {}['no such key']\n"
    task = write_task("inner()", head=head)
    with pytest.raises(WorkerFailure) as info:
        start(task).load()
    frames = info.value.frames
    assert frames.index("in build_model") < frames.index("in inner") < frames.index("KeyError")
    assert str(Path(client.__file__).parents[1]) not in frames


def test_what_a_task_prints_does_not_fill_the_disk(write_task, start, monkeypatch) -> None:
    """The guard cuts the log while it grows; its end can still be read."""
    task = write_task(
        """
        import os, time
        for _ in range(160):
            os.write(1, b'x' * (1 << 20) + b'\\n')
        for _ in range(1000):
            if os.fstat(1).st_size < 64 << 20:
                break
            time.sleep(0.05)
        print('the last words:', os.fstat(1).st_size >> 20, 'MiB are left', flush=True)
        os._exit(3)
        """
    )
    worker = start(task)
    log = worker._log
    with pytest.raises(WorkerFailure) as info:
        worker.load()
    left = re.search(r"the last words: (\d+) MiB are left", info.value.frames)
    assert left is not None, info.value.frames
    assert int(left[1]) < 64, "of 160 MiB"
    assert log.closed


# Hangs -------------------------------------------------------------------------------------------

HANGS = {
    "sleeps": "import time; time.sleep(3600)",
    "spins": "while True: pass",
    "ignores signals": """
        import signal, time
        for number in signal.valid_signals():
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        while True:
            time.sleep(1)
        """,
    "holds the interpreter's lock in C": "import re; re.match(r'(a+)+$', 'a' * 64 + 'b')",
    "waits for a child": "import subprocess; subprocess.run(['sleep', '3600'])",
    "hangs beside a thread that beats": """
        import threading, time
        def beat():
            while True:
                time.sleep(0.01)
        threading.Thread(target=beat, daemon=True).start()
        time.sleep(3600)
        """,
    "is stopped": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
}


@linux
@pytest.mark.parametrize("fault", HANGS.values(), ids=HANGS)
def test_a_hang_ends_with_its_allowance(fault: str, write_task, start, monkeypatch) -> None:
    monkeypatch.setitem(timeouts.PHASE_TIMEOUT_SECONDS, "build", 1.0)
    worker = start(write_task(fault))
    began = time.monotonic()
    with pytest.raises(WorkerFailure) as info:
        worker.load()
    assert info.value.kind == FailureKind.TIMEOUT
    assert "build" in info.value.message
    assert not worker.alive
    assert time.monotonic() - began < 30


def test_a_hang_shows_where_it_hangs(write_task, start, monkeypatch) -> None:
    monkeypatch.setitem(timeouts.PHASE_TIMEOUT_SECONDS, "build", 1.0)
    task = write_task("wait_for_ever()", head="def wait_for_ever():\n    while True: pass\n")
    with pytest.raises(WorkerFailure) as info:
        start(task).load()
    assert "in wait_for_ever" in info.value.frames
    assert "autoprec/tuning" not in info.value.frames


def test_patience_multiplies_every_allowance(write_task, start, monkeypatch) -> None:
    monkeypatch.setitem(timeouts.PHASE_TIMEOUT_SECONDS, "build", 0.2)
    monkeypatch.setenv(timeouts.PATIENCE_VARIABLE, "100")
    assert start(write_task("import time; time.sleep(1)")).load()


# The tuner's own end -----------------------------------------------------------------------------

TUNER = """
import sys, time
from pathlib import Path
from autoprec.workers.client import Worker, WorkerSettings
from autoprec.workers.task_source import TaskSource
worker = Worker(WorkerSettings(TaskSource(Path(sys.argv[1]))))
print("started", flush=True)
worker.load()
"""

STUCK = {
    "loading": "import time; time.sleep(3600)",
    "holding the interpreter's lock": "import re; re.match(r'(a+)+$', 'a' * 64 + 'b')",
    "with daemons of its own": """
        import os, subprocess, time
        subprocess.Popen(['sleep', '3600'], start_new_session=True)
        if os.fork() == 0:
            os.setsid()
            time.sleep(3600)
        time.sleep(3600)
        """,
    "ignoring signals": """
        import signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        time.sleep(3600)
        """,
}


@linux
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
@pytest.mark.parametrize("fault", STUCK.values(), ids=STUCK)
def test_nothing_outlives_the_tuner(
    fault: str, number: signal.Signals, write_task, mark: str, tmp_path: Path
) -> None:

    sign = tmp_path / "there"
    there = write_task(f"open({str(sign)!r}, 'w').close()\n" + textwrap.dedent(fault))
    tuner = subprocess.Popen(
        [sys.executable, "-c", TUNER, str(there)],
        env={**os.environ, MARK: mark},
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 30
    while not sign.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert sign.exists()
    time.sleep(0.2)
    tuner.send_signal(number)
    tuner.wait(timeout=30)
    assert survivors(mark) == []
