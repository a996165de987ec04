"""Kill a tuning again and again, and count what was lost.

    python -m benchmarks.faults.soak        200 faults simulated, 20 with torch, 4 seeds
    python -m benchmarks.faults.soak --simulated 30 --torch 0 --seeds 7

A tuning is started by its command line and, at a random moment, hit by a fault: a signal to the
tuner, to its worker or to the worker's guard, a full disk, a torn journal. Then the same command is
run again, until it ends by itself; then a new tuning is begun, until all faults are spent. Counted:

- trials run again: a trial that was said to be finished, and is said once more; not where the
  tuning says that the machine's speed has changed and the earlier trials are measured again
- trials missing: a trial that was said to be finished, and is not in the journal when the tuning
  has ended by itself
- files half-written: a profile that is not one; when the tuning has ended by itself, any file that
  is neither the task's, the journal's nor the profile's
- survivors: processes with this run's mark in their environment, 10 s after the fault, and 10 s
  after the tuning has ended by itself
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
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from autoprec.workers.supervisor import descendants_of
from benchmarks.checkout import RESULTS
from benchmarks.faults.soaked_tuning import (
    FINISHED,
    MEASURED_AGAIN,
    TASK_TEXTS,
    SoakedTuning,
    kept_trials,
    missing_trials,
    parent_of,
    recipe_of,
)
from benchmarks.provenance import commit


@dataclass(frozen=True)
class Fault:
    """What befalls a tuning, and how often relative to the other faults.

    `signal` goes to `target` (None: nothing is sent, the disk is full).
    """

    name: str
    weight: int
    signal: signal.Signals | None
    target: Literal["tuner", "worker", "guard"] = "tuner"
    tears_journal: bool = False


FAULTS = (
    Fault("SIGKILL to the tuner", 60, signal.SIGKILL),
    Fault("SIGTERM to the tuner", 10, signal.SIGTERM),
    Fault("SIGINT to the tuner", 10, signal.SIGINT),
    Fault("SIGHUP to the tuner", 5, signal.SIGHUP),
    Fault("SIGKILL to the worker", 10, signal.SIGKILL, "worker"),
    Fault("SIGKILL to the guard", 5, signal.SIGKILL, "guard"),
    Fault("SIGKILL, and the journal's end torn", 10, signal.SIGKILL, tears_journal=True),
    Fault("the disk is full", 5, None),
)


#: What is wrong at the end of a tuning that no fault hit is counted here.
NO_FAULT = "none"


@dataclass
class Count:
    """What became of one kind of fault."""

    injected: int = 0
    survived: int = 0
    trials_lost: int = 0
    missing: int = 0
    half_written: int = 0
    survivors: int = 0


@dataclass
class Soak:
    """The faults of one framework, injected one after another."""

    place: SoakedTuning
    rng: random.Random
    seed: int = 0
    counts: dict[str, Count] = field(default_factory=dict)
    tunings: int = 0
    recipes_changed: int = 0
    remeasured: int = 0
    recipe: Any = None
    seconds: float = 0.0
    trials: int = 0
    problems: list[str] = field(default_factory=list)
    _last: tuple[str, bool] | None = None

    @property
    def framework(self) -> str:
        """What the tunings train with."""
        return self.place.framework

    def run(self, faults: int) -> None:
        """Inject so many faults; every tuning is let to its end after its last one."""
        began = time.monotonic()
        text = self._whole()
        self.recipe, self.seconds = recipe_of(self.place.profile), time.monotonic() - began
        self.trials = len(FINISHED.findall(text))
        left = faults
        while left > 0:
            left -= self._one_tuning(left)

    def _whole(self) -> str:
        """A tuning that nobody disturbs."""
        self.place.clean()
        child = self.place.start()
        text = child.communicate(timeout=600)[1]
        if child.returncode != 0:
            raise SystemExit(f"an undisturbed tuning ended with {child.returncode}:\n{text}")
        if not FINISHED.search(text) or not self.place.journal.exists():
            raise SystemExit(f"an undisturbed tuning ran no trial, or kept none:\n{text}")
        return text

    def _one_tuning(self, left: int) -> int:
        """One tuning under faults, to its end; return how many were injected."""
        self.place.clean()
        finished: Counter[str] = Counter()
        injected = 0
        self._last = None
        while True:
            fault = self._draw() if injected < left else None
            full = fault is not None and fault.signal is None
            child = self.place.start(full_after=self.place.journal_room() if full else None)
            hit = full or (fault is not None and self._strike(child, fault))
            text = child.communicate(timeout=600)[1]
            if MEASURED_AGAIN in text:
                finished.clear()
                self.remeasured += 1
            finished.update(FINISHED.findall(text))
            if not hit:
                fault = None
            if fault is not None:
                injected += 1
                self._judge(fault.name, text, finished, child.returncode)
            elif child.returncode != 0:
                self.problems.append(f"exit {child.returncode} without a fault: {text[-500:]}")
                return injected
            if child.returncode == 0:
                break
        self.tunings += 1
        self._compare(finished)
        return injected

    def _draw(self) -> Fault:
        return self.rng.choices(FAULTS, [fault.weight for fault in FAULTS])[0]

    def _strike(self, child: subprocess.Popen[str], fault: Fault) -> bool:
        """Wait for a random moment, then hit; False if the tuning ended before."""
        moment = time.monotonic() + self.rng.uniform(0.05, 0.7 * self.seconds)
        while time.monotonic() < moment:
            if child.poll() is not None:
                return False
            time.sleep(0.005)
        if fault.target == "tuner":
            target = child.pid
        else:
            family = descendants_of(child.pid)
            guards = [pid for pid in family if parent_of(pid) == child.pid]
            wanted = guards if fault.target == "guard" else [p for p in family if p not in guards]
            if not wanted:
                return False
            target = self.rng.choice(wanted)
        try:
            os.kill(target, fault.signal)
        except ProcessLookupError:
            return False
        if fault.tears_journal:
            child.wait(timeout=60)
            if self.place.journal.exists():
                with self.place.journal.open("ab") as file:
                    file.write(b'{"op_code":8,"worker_id":"torn'[: self.rng.randrange(1, 30)])
        return True

    def _judge(self, fault: str, text: str, finished: Counter[str], code: int | None) -> None:
        count = self.counts.setdefault(fault, Count())
        count.injected += 1
        again = [name for name, times in finished.items() if times > 1]
        for name in again:
            finished[name] = 1
        count.trials_lost += len(again)
        half = self.place.half_written()
        count.half_written += len(half)
        alive = self.place.survivors()
        count.survivors += len(alive)
        expected = {0, 1, 2, 130, -signal.SIGKILL, -signal.SIGHUP, -signal.SIGTERM, -signal.SIGINT}
        sound = code in expected and "Traceback (most recent call last)" not in text
        bad = again or half or alive or not sound
        count.survived += not bad
        self._last = (fault, not bad)
        if bad:
            self.problems.append(
                f"{fault}: again {again}, half {half}, alive {alive}, exit {code}: {text[-800:]}"
            )

    def _compare(self, finished: Counter[str]) -> None:
        """Look at what a tuning that has ended by itself left."""
        if not finished:
            self.problems.append("a tuning said of no trial that it was finished")
        again = [name for name, times in finished.items() if times > 1]
        if again:
            self.problems.append(f"run again: {again}")
        missing = missing_trials(finished, kept_trials(self.place.journal))
        strange, alive = self.place.unknown_files(), self.place.survivors()
        if missing or strange or alive:
            self.problems.append(
                f"at the end: missing {missing}, half-written {strange}, processes {alive}"
            )
            self._count_at_the_end(len(missing), len(strange), len(alive))
        found = recipe_of(self.place.profile)
        known = json.loads(json.dumps(found))
        if self.framework == "simulated" and known != self.recipe:
            self.recipes_changed += 1
            self.problems.append(f"recipe changed: {known} instead of {self.recipe}")

    def _count_at_the_end(self, missing: int, half_written: int, survivors: int) -> None:
        """Lay what is wrong at a tuning's end to its last fault, which was not survived then."""
        fault, survived = self._last or (NO_FAULT, False)
        count = self.counts.setdefault(fault, Count())
        count.missing += missing
        count.half_written += half_written
        count.survivors += survivors
        count.survived -= survived
        self._last = (fault, False)


def table(soaks: list[Soak]) -> str:
    """The counts as text."""
    words = (("", "injected"), ("", "survived"), ("trials", "again"), ("trials", "missing"))
    words += (("half-", "written"), ("pro-", "cesses"))
    head = "\n".join(
        f"{'':10}  {'fault' if row else '':36} " + " ".join(f"{pair[row]:>8}" for pair in words)
        for row in (0, 1)
    )
    lines = [head]
    for soak in soaks:
        total = Count()
        for fault in (*(each.name for each in FAULTS), NO_FAULT):
            if fault in soak.counts:
                lines.append(_line(soak.framework, fault, soak.counts[fault]))
                for name, value in vars(soak.counts[fault]).items():
                    setattr(total, name, getattr(total, name) + value)
        lines.append(_line(soak.framework, "all", total))
        changed = "" if soak.framework != "simulated" else f", {soak.recipes_changed} other recipes"
        again = f", {soak.remeasured} times at another speed" if soak.remeasured else ""
        lines.append(
            f"{soak.framework}, seed {soak.seed}: {soak.tunings} tunings brought to their end"
            f"{changed}{again}"
        )
    return "\n".join(lines)


def _line(framework: str, name: str, count: Count) -> str:
    numbers = " ".join(f"{value:8d}" for value in vars(count).values())
    return f"{framework:10}  {name:36} {numbers}"


def main() -> int:
    """Run the soak; exit 1 if anything was lost."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--simulated", type=int, default=200, metavar="FAULTS")
    parser.add_argument("--torch", type=int, default=20, metavar="FAULTS")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2, 3], help="the faults are shared out"
    )
    parser.add_argument("--output", type=Path, help="where the JSON goes (default: results/)")
    arguments = parser.parse_args()
    soaks = []
    with tempfile.TemporaryDirectory(prefix="autoprec-soak-") as name:
        for framework in TASK_TEXTS:
            faults = shared_out(getattr(arguments, framework), len(arguments.seeds))
            for seed, count in zip(arguments.seeds, faults, strict=True):
                if count > 0:
                    rng = random.Random(f"{seed}-{framework}")
                    soak = Soak(SoakedTuning(framework, Path(name) / framework, rng), rng, seed)
                    began = time.monotonic()
                    soak.run(count)
                    took = time.monotonic() - began
                    print(f"{framework}, seed {seed}: {took:.0f} s", file=sys.stderr)
                    soaks.append(soak)
    print(table(soaks))
    for soak in soaks:
        for problem in soak.problems:
            print(f"PROBLEM ({soak.framework}): {problem}", file=sys.stderr)
    day = time.strftime("%Y-%m-%d")
    output = arguments.output or RESULTS / f"soak-{day}.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report(soaks), indent=2) + "\n")
    return 1 if any(soak.problems for soak in soaks) else 0


def shared_out(faults: int, seeds: int) -> list[int]:
    """So many faults in as equal parts as there are seeds."""
    return [faults // seeds + (index < faults % seeds) for index in range(seeds)]


def report(soaks: list[Soak]) -> dict[str, Any]:
    """What is kept of a run."""
    return {
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "system": platform.platform(),
        "commit": commit(),
        "soaks": [
            {
                "framework": soak.framework,
                "seed": soak.seed,
                "undisturbed_seconds": round(soak.seconds, 1),
                "trials_of_a_tuning": soak.trials,
                "tunings": soak.tunings,
                "recipes_changed": soak.recipes_changed,
                "remeasured": soak.remeasured,
                "problems": soak.problems,
                "faults": {fault: vars(count) for fault, count in soak.counts.items()},
            }
            for soak in soaks
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
