"""Kill a tuning again and again, and count what was lost.

    python benchmarks/soak.py                       200 faults simulated, 20 with torch
    python benchmarks/soak.py --simulated 30 --torch 0 --seed 7

A tuning is started by its command line and, at a random moment, hit by a fault: a signal to the
tuner, to its worker or to the worker's guard, a full disk, a torn journal. Then the same command is
run again, until it ends by itself; then a new tuning is begun, until all faults are spent. Counted:

- trials lost: a trial that was said to be finished and is run again, or is missing at the end
- files half-written: a profile that is not one, or what a writer left beside it
- survivors: processes with this run's mark in their environment, 10 s after the fault
- recipe changed: the profile's recipe is not that of a tuning that nobody disturbed (simulated:
  there the same history gives the same recipe)

The table is printed, and written as JSON to --output.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
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
from autoprec.tuning.guard import descendants_of

MARK = "AUTOPREC_SOAK"
RESULTS = Path(__file__).parent / "results"

SIMULATED = """
from autoprec.backends.simulated import SimulatedModel

def build_model():
    return SimulatedModel(
        overhead={"float32": 0.004, "mixed_bfloat16": 0.006, "mixed_float16": 0.006},
        per_sample={"float32": 0.0005, "mixed_bfloat16": 0.0002, "mixed_float16": 0.0003},
        broken=("mixed_float16",), sleep=0.003)

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
TASKS = {"simulated": SIMULATED, "torch": TORCH}

# Without a framework there is nothing to time this machine's matrix products with; that part of a
# tuning is left out where torch is installed as well, so that faults do not fall into it mostly.
UNMEASURED = """
import sys
from autoprec import api, cli
api._measured = lambda facts, frameworks: facts
sys.exit(cli.main(sys.argv[1:]))
"""
COMMANDS = {"simulated": ["-c", UNMEASURED], "torch": ["-m", "autoprec"]}

#: How often each fault is injected, relative to the others.
FAULTS = {
    "SIGKILL to the tuner": 60,
    "SIGTERM to the tuner": 10,
    "SIGINT to the tuner": 10,
    "SIGHUP to the tuner": 5,
    "SIGKILL to the worker": 10,
    "SIGKILL to the guard": 5,
    "SIGKILL, and the journal's end torn": 10,
    "the disk is full": 5,
}

_FINISHED = re.compile(r"^  trial +\d+  (.+?): ", re.MULTILINE)


@dataclass
class Count:
    """What became of one kind of fault."""

    injected: int = 0
    survived: int = 0
    trials_lost: int = 0
    half_written: int = 0
    survivors: int = 0


@dataclass
class Soak:
    """The faults of one framework, injected one after another."""

    framework: str
    folder: Path
    rng: random.Random
    counts: dict[str, Count] = field(default_factory=dict)
    tunings: int = 0
    recipes_changed: int = 0
    recipe: Any = None
    seconds: float = 0.0
    trials: int = 0
    problems: list[str] = field(default_factory=list)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def run(self, faults: int) -> None:
        """Inject so many faults; every tuning is let to its end after its last one."""
        began = time.monotonic()
        text = self._whole()
        self.recipe, self.seconds = recipe_of(self._profile), time.monotonic() - began
        self.trials = len(_FINISHED.findall(text))
        left = faults
        while left > 0:
            left -= self._one_tuning(left)

    def _whole(self) -> str:
        """A tuning that nobody disturbs."""
        self._clean()
        child = self._start()
        text = child.communicate(timeout=600)[1]
        if child.returncode != 0:
            raise SystemExit(f"an undisturbed tuning ended with {child.returncode}:\n{text}")
        return text

    def _one_tuning(self, left: int) -> int:
        """One tuning under faults, to its end; return how many were injected."""
        self._clean()
        finished: Counter[str] = Counter()
        injected = 0
        while True:
            fault = self._draw() if injected < left else None
            full = fault == "the disk is full"
            child = self._start(full_after=self._journal_room() if full else None)
            hit = self._strike(child, fault) if fault and not full else full
            text = child.communicate(timeout=600)[1]
            finished.update(_FINISHED.findall(text))
            if not hit:
                fault = None
            if fault is not None:
                injected += 1
                self._judge(fault, text, finished, child.returncode)
            elif child.returncode != 0:
                self.problems.append(f"exit {child.returncode} without a fault: {text[-500:]}")
                return injected
            if child.returncode == 0:
                break
        self.tunings += 1
        self._compare(finished)
        return injected

    def _draw(self) -> str:
        return self.rng.choices(list(FAULTS), list(FAULTS.values()))[0]

    def _strike(self, child: subprocess.Popen[str], fault: str) -> bool:
        """Wait for a random moment, then hit; False if the tuning ended before."""
        moment = time.monotonic() + self.rng.uniform(0.05, 0.7 * self.seconds)
        while time.monotonic() < moment:
            if child.poll() is not None:
                return False
            time.sleep(0.005)
        number = getattr(signal, re.match(r"SIG\w+", fault)[0])
        if fault.endswith("the tuner") or "journal" in fault:
            target = child.pid
        else:
            family = descendants_of(child.pid)
            guards = [pid for pid in family if parent_of(pid) == child.pid]
            wanted = guards if "guard" in fault else [p for p in family if p not in guards]
            if not wanted:
                return False
            target = self.rng.choice(wanted)
        try:
            os.kill(target, number)
        except ProcessLookupError:
            return False
        if "journal" in fault:
            child.wait(timeout=60)
            if self._journal.exists():
                with self._journal.open("ab") as file:
                    file.write(b'{"op_code":8,"worker_id":"torn'[: self.rng.randrange(1, 30)])
        return True

    def _judge(self, fault: str, text: str, finished: Counter[str], code: int | None) -> None:
        count = self.counts.setdefault(fault, Count())
        count.injected += 1
        again = [name for name, times in finished.items() if times > 1]
        for name in again:
            finished[name] = 1
        count.trials_lost += len(again)
        half = self._half_written()
        count.half_written += len(half)
        alive = self._survivors()
        count.survivors += len(alive)
        expected = {0, 1, 2, 130, -signal.SIGKILL, -signal.SIGHUP, -signal.SIGTERM, -signal.SIGINT}
        sound = code in expected and "Traceback (most recent call last)" not in text
        bad = again or half or alive or not sound
        count.survived += not bad
        if bad:
            self.problems.append(
                f"{fault}: again {again}, half {half}, alive {alive}, exit {code}: {text[-800:]}"
            )

    def _compare(self, finished: Counter[str]) -> None:
        again = [name for name, times in finished.items() if times > 1]
        if again:
            self.problems.append(f"run again: {again}")
        found = recipe_of(self._profile)
        known = json.loads(json.dumps(found))
        if self.framework == "simulated" and known != self.recipe:
            self.recipes_changed += 1
            self.problems.append(f"recipe changed: {known} instead of {self.recipe}")

    # The place -----------------------------------------------------------------------------------

    @property
    def _task(self) -> Path:
        return self.folder / "task.py"

    @property
    def _journal(self) -> Path:
        return self.folder / "task.study.journal"

    @property
    def _profile(self) -> Path:
        return self.folder / "task.profile.yaml"

    def _clean(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        (self.folder / "tmp").mkdir(parents=True)
        self._task.write_text(TASKS[self.framework])

    def _journal_room(self) -> int:
        """A file size that the journal will reach while the tuning runs."""
        size = self._journal.stat().st_size if self._journal.exists() else 0
        return size + self.rng.randrange(1, 60_000)

    def _start(self, full_after: int | None = None) -> subprocess.Popen[str]:
        def no_more_room() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (full_after, full_after))
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

        limit: Callable[[], None] | None = no_more_room if full_after is not None else None
        return subprocess.Popen(
            [
                *(sys.executable, *COMMANDS[self.framework], "tune", str(self._task)),
                *OPTIONS[self.framework],
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=limit,  # noqa: PLW1509 - this process has one thread
            # A folder for locks of its own: other tunings on this machine are not what is tested.
            env={
                **os.environ,
                MARK: self.mark,
                "TMPDIR": str(self.folder / "tmp"),
                "COLUMNS": "400",
                "PYTHONUNBUFFERED": "1",
            },
        )

    def _half_written(self) -> list[str]:
        bad = []
        if self._profile.exists():
            try:
                load_profile(self._profile)
            except ProfileError as error:
                bad.append(str(error))
        return bad

    def _survivors(self) -> list[str]:
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


def table(soaks: list[Soak]) -> str:
    """The counts as text."""
    head = f"{'':10}  {'fault':36} {'injected':>8} {'survived':>8} {'trials':>8} {'half-':>8}"
    head += f" {'pro-':>8}\n{'':10}  {'':36} {'':8} {'':8} {'lost':>8} {'written':>8} {'cesses':>8}"
    lines = [head]
    for soak in soaks:
        total = Count()
        for fault in FAULTS:
            if fault in soak.counts:
                lines.append(_line(soak.framework, fault, soak.counts[fault]))
                for name, value in vars(soak.counts[fault]).items():
                    setattr(total, name, getattr(total, name) + value)
        lines.append(_line(soak.framework, "all", total))
        changed = "" if soak.framework != "simulated" else f", {soak.recipes_changed} other recipes"
        lines.append(f"{soak.framework}: {soak.tunings} tunings brought to their end{changed}")
    return "\n".join(lines)


def _line(framework: str, name: str, count: Count) -> str:
    numbers = " ".join(f"{value:8d}" for value in vars(count).values())
    return f"{framework:10}  {name:36} {numbers}"


def main() -> int:
    """Run the soak; exit 1 if anything was lost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--simulated", type=int, default=200, metavar="FAULTS")
    parser.add_argument("--torch", type=int, default=20, metavar="FAULTS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="where the JSON goes (default: results/)")
    arguments = parser.parse_args()
    soaks = []
    with tempfile.TemporaryDirectory(prefix="autoprec-soak-") as name:
        for framework in TASKS:
            faults = getattr(arguments, framework)
            if faults > 0:
                seed = f"{arguments.seed}-{framework}"
                soak = Soak(framework, Path(name) / framework, random.Random(seed))
                began = time.monotonic()
                soak.run(faults)
                print(f"{framework}: {time.monotonic() - began:.0f} s", file=sys.stderr)
                soaks.append(soak)
    print(table(soaks))
    for soak in soaks:
        for problem in soak.problems:
            print(f"PROBLEM ({soak.framework}): {problem}", file=sys.stderr)
    day = time.strftime("%Y-%m-%d")
    output = arguments.output or RESULTS / f"soak-{day}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report(soaks, arguments.seed), indent=2) + "\n")
    return 1 if any(soak.problems for soak in soaks) else 0


def report(soaks: list[Soak], seed: int) -> dict[str, Any]:
    """What is kept of a run."""
    return {
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "system": platform.platform(),
        "seed": seed,
        "soaks": [
            {
                "framework": soak.framework,
                "undisturbed_seconds": round(soak.seconds, 1),
                "trials_of_a_tuning": soak.trials,
                "tunings": soak.tunings,
                "recipes_changed": soak.recipes_changed,
                "problems": soak.problems,
                "faults": {fault: vars(count) for fault, count in soak.counts.items()},
            }
            for soak in soaks
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
