"""Where a soaked tuning runs: its task and files, how it is started, and what it left behind."""

from __future__ import annotations

import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from autoprec.errors import ProfileError
from autoprec.profiles import load_profile
from benchmarks.checkout import child_environment

MARK = "AUTOPREC_SOAK"

SIMULATED = """
from simulated import SimulatedModel

def build_model():
    return SimulatedModel(
        overhead={"float32": 0.004, "mixed_bfloat16": 0.006, "mixed_float16": 0.006},
        per_sample={"float32": 0.0005, "mixed_bfloat16": 0.0002, "mixed_float16": 0.0003},
        broken=("mixed_float16",), sleep_seconds=0.003)

def build_data(batch_size):
    return []
"""

TORCH = """
import torch

def build_model():
    return torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))

def build_data(batch_size):
    while True:
        yield torch.randn(batch_size, 64), torch.randint(0, 10, (batch_size,))

def loss_fn(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs, targets)
"""

OPTIONS = {
    "simulated": [
        *("--policies", "float32,mixed_bfloat16,mixed_float16"),
        *("--batch-sizes", "8-256", "--rounds", "5"),
    ],
    "torch": ["--batch-sizes", "8-64", "--rounds", "5", "--proof-seconds", "10"],
}
TASK_TEXTS = {"simulated": SIMULATED, "torch": TORCH}

# Without a framework there is nothing to time this machine's matrix products with; that part of a
# tuning is left out where torch is installed as well, so that faults do not fall into it mostly. As
# `python -m autoprec` does, it is stopped quietly while it is imported, too.
UNMEASURED_PROGRAM = """
import sys
try:
    from autoprec import cli, probing
    probing.measure_device = lambda facts, frameworks: facts
    code = cli.main(sys.argv[1:])
except KeyboardInterrupt:
    code = 130
sys.exit(code)
"""
COMMANDS = {"simulated": ["-c", UNMEASURED_PROGRAM], "torch": ["-m", "autoprec"]}

#: What a tuning says of a trial that it has finished.
FINISHED = re.compile(r"^  trial +\d+  (.+?): ", re.MULTILINE)
MEASURED_AGAIN = "of the earlier trials: they are measured again"
"""What a resumed tuning says where the machine's speed has changed too much to compare trials."""

_NAMED = re.compile(r"(\w+), batch (\d+)(?: in \d+ micro-batches of (\d+))?")


@dataclass
class SoakedTuning:
    """The folder of one framework's tunings, and the mark by which its processes are known."""

    framework: str
    folder: Path
    rng: random.Random
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def task(self) -> Path:
        return self.folder / "task.py"

    @property
    def journal(self) -> Path:
        return self.folder / "task.study.journal"

    @property
    def profile(self) -> Path:
        return self.folder / "task.profile.yaml"

    def clean(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / "tmp").mkdir(parents=True)
        self.task.write_text(TASK_TEXTS[self.framework])

    def journal_room(self) -> int:
        """A file size that the journal will reach while the tuning runs."""
        size = self.journal.stat().st_size if self.journal.exists() else 0
        return size + self.rng.randrange(1, 60_000)

    def start(self, full_after: int | None = None) -> subprocess.Popen[str]:
        def no_more_room() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (full_after, full_after))
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

        limit: Callable[[], None] | None = no_more_room if full_after is not None else None
        return subprocess.Popen(
            [
                *(sys.executable, *COMMANDS[self.framework], "tune", str(self.task)),
                *OPTIONS[self.framework],
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=limit,  # noqa: PLW1509 - this process has one thread
            # A folder for locks of its own: other tunings on this machine are not what is tested.
            # Without a cache the study is beside the task, and gone with the folder; one that is
            # found again would end a tuning before any fault could hit it.
            env={
                **child_environment(
                    AUTOPREC_CACHE="",
                    TMPDIR=str(self.folder / "tmp"),
                    COLUMNS="400",
                    PYTHONUNBUFFERED="1",
                ),
                MARK: self.mark,
            },
        )

    def half_written(self) -> list[str]:
        bad = []
        if self.profile.exists():
            try:
                load_profile(self.profile)
            except ProfileError as error:
                bad.append(str(error))
        return bad

    def unknown_files(self) -> list[str]:
        """Files that are neither the task's, the journal's nor the profile's."""
        own = (self.task.name, self.profile.name, "tmp", "__pycache__")
        names = [path.name for path in self.folder.iterdir()]
        return [n for n in names if n not in own and not n.startswith(self.journal.name)]

    def survivors(self) -> list[str]:
        deadline = time.monotonic() + 10
        while (left := self._marked()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return left

    def _marked(self) -> list[str]:
        wanted = f"{MARK}={self.mark}".encode()
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    if wanted in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                        found.append(Path(f"/proc/{name}/cmdline").read_text(errors="replace"))
                except OSError:
                    continue
        return found


def parent_of(process: int) -> int:
    """A process's parent; 0 if it has gone."""
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return 0


def recipe_of(profile: Path) -> Any:
    """The recipe that a profile file holds."""
    return yaml.safe_load(profile.read_text())["recipe"]


def kept_trials(journal: Path) -> Counter[tuple[str, int]]:
    """How many trials with an outcome the journal holds, by policy and batch."""
    from autoprec.tuning.study.storage import open_storage

    storage = open_storage(journal)
    found: Counter[tuple[str, int]] = Counter()
    for study in storage.get_all_studies():
        for trial in storage.get_all_trials(study._study_id):
            outcome = trial.user_attrs.get("outcome")
            if outcome is not None:
                point = outcome["point"]
                found[str(point["policy"]), int(point["batch_size"])] += 1
    return found


def missing_trials(said: Counter[str], kept: Counter[tuple[str, int]]) -> list[str]:
    """The trials that a tuning said it had finished, and that its journal does not hold.

    Both are counted by policy and batch, for that is what the two texts have in common.
    """
    named: Counter[tuple[str, int]] = Counter()
    for text in said:
        found = _NAMED.match(text)
        if found is None:
            raise ValueError(f"{text!r} given, expected a recipe such as 'float32, batch 8'")
        named[found[1], int(found[3] or found[2])] += 1
    return [f"{policy}, batch {batch}" for policy, batch in (named - kept).elements()]
