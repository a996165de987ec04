"""Task files for clusters, and the command line run on them in a process of its own."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

QUICK = (
    *("--batch-sizes", "16,32,64", "--policies", "float32,mixed_bfloat16"),
    *("--rounds", "2", "--proof-steps", "8"),
)

_TASK = '''
"""A simulated model that gains from bfloat16; says in a file which process built it where.

It is not built while there is a file `held` beside this one.
"""

import json
import os
import time
from pathlib import Path

from simulated import SimulatedModel


def parent_of(process):
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def build_model():
    line = {
        "node": os.environ.get("NODE", ""),
        "worker": os.getpid(),
        "tuner": parent_of(os.getppid()),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "folder": os.getcwd(),
    }
    with Path(__file__).with_name("log").open("a") as log:
        log.write(json.dumps(line) + "\\n")
    while Path(__file__).with_name("held").exists():
        time.sleep(0.05)
    return SimulatedModel(
        overhead={"float32": 0.004, "mixed_bfloat16": 0.006},
        per_sample={"float32": 0.0005, "mixed_bfloat16": 0.0002},
        sleep_seconds=STEP_SECONDS,
    )


def build_data(batch_size):
    return []
'''


def write_task(folder: Path, *, step_seconds: float = 0.0) -> Path:
    """Write the task file; a step really takes `step_seconds`."""
    folder.mkdir(parents=True)
    task = folder / "model.py"
    task.write_text(_TASK.replace("STEP_SECONDS", str(step_seconds)))
    return task


def built(task: Path) -> list[dict[str, Any]]:
    """Return what the task has said: one entry for each model that was built."""
    log = task.with_name("log")
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


class Command:
    """A running command, whose lines on stderr can be waited for."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._more = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._more:
                self.lines.append(line.rstrip("\n"))
                self._more.notify_all()
        with self._more:
            self._more.notify_all()

    def wait_for(self, pattern: str, *, count: int = 1, seconds: float = 120) -> None:
        """Wait until `count` lines match."""

        def seen() -> bool:
            found = sum(re.search(pattern, line) is not None for line in self.lines)
            return found >= count or not self._reader.is_alive()

        with self._more:
            assert self._more.wait_for(seen, seconds), self.text
        assert sum(re.search(pattern, line) is not None for line in self.lines) >= count, self.text

    def end(self, seconds: float = 240) -> tuple[int, str]:
        """Wait for the end; return the exit code and stdout."""
        assert self.process.stdout is not None
        out = self.process.stdout.read()
        code = self.process.wait(seconds)
        self._close()
        return code, out

    def kill(self) -> None:
        """End the process without a word."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)
        self._close()

    def _close(self) -> None:
        self._reader.join(10)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()

    @property
    def text(self) -> str:
        """Return everything on stderr so far."""
        return "\n".join(self.lines)

    def trials(self, name: str = "") -> list[str]:
        """Return the recipes that were said to be measured, of one type or of all."""
        return re.findall(rf"^{name}\S*:   trial +\d+  (.+?): ", self.text, re.MULTILINE)


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> None:
    """Wait for something that other processes bring about."""
    waited = threading.Event()
    for _ in range(int(seconds / 0.05)):
        if condition():
            return
        waited.wait(0.05)
    raise AssertionError("it did not happen")
