"""The tuner on six tasks that no change of it may be developed on, run once for a release.

    python -m benchmarks.profiles.holdout

Each task of benchmarks/holdout/ is tuned by the command line, as the README says. Then, in fresh
processes, the profile applied, the loop as it was, and that loop at the chosen batch train in
alternation. What comes of it is written, whatever it is: CONTRIBUTING.md says what may be done with
these tasks, and what not.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from autoprec.core.codec import to_plain
from autoprec.core.profile import Profile
from autoprec.core.speed.noise import paired_ratio
from autoprec.profiles import load_profile
from autoprec.yaml_files import write_text
from benchmarks.checkout import HOLDOUT, RESULTS, child_environment
from benchmarks.provenance import machine
from benchmarks.search.oracle_rows import ratio_text, words

APPLIED, PLAIN, AT_ITS_BATCH = "applied", "plain", "plain at its batch"


class TrainingLoop:
    """A training loop in a process of its own, which trains when it is told to."""

    def __init__(self, task: Path, *words: object) -> None:
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in __exit__)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.profiles.holdout_training", task, *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env=child_environment(TF_CPP_MIN_LOG_LEVEL="3"),
        )

    def __enter__(self) -> TrainingLoop:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()
        self._stderr.close()

    def ready(self) -> None:
        """Wait until it has trained its first steps."""
        self._answer()

    def train(self, seconds: float) -> float:
        """Train for so long; samples per second."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._stderr.seek(0)
            lines = self._stderr.read().strip().splitlines()
            raise RuntimeError(f"a loop ended: {(lines or ['without a word'])[-1][:200]}")
        return line


def tuned(task: Path, folder: Path, more: Sequence[str]) -> tuple[Profile, Path, float]:
    """The profile that `autoprec tune` writes, its file, and the seconds that took."""
    output = folder / "model.profile.yaml"
    began = time.monotonic()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "autoprec", "tune", str(task), "--device", "cpu"),
            *("--output", str(output), "--storage", str(folder / "study.journal"), *more),
        ],
        env=child_environment(TF_CPP_MIN_LOG_LEVEL="3"),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["without a word"])[-1]
        raise RuntimeError(f"autoprec tune ended with {done.returncode}: {last[:200]}")
    return load_profile(output), output, time.monotonic() - began


def alternated(
    task: Path,
    sides: Mapping[str, Sequence[object]],
    *,
    processes: int,
    rounds: int,
    seconds: float,
) -> dict[str, list[float]]:
    """Every side's rates, round by round, over several processes of each."""
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for process in range(processes):
        with ExitStack() as stack:
            order = list(sides)[:: -1 if process % 2 else 1]
            open_now = {}
            for name in order:
                open_now[name] = stack.enter_context(TrainingLoop(task, *sides[name]))
                open_now[name].ready()
            for round_ in range(rounds):
                for name in order[:: -1 if round_ % 2 else 1]:
                    rates[name].append(open_now[name].train(seconds))
    return rates


def by_process(rates: Sequence[float], rounds: int) -> list[float]:
    """The geometric mean of each process's rounds: rounds of one process are not independent."""
    each = [rates[first : first + rounds] for first in range(0, len(rates), rounds)]
    return [math.exp(sum(map(math.log, own)) / len(own)) for own in each]


def own_batch(profile: Profile) -> int:
    """The batch of the loop as it was."""
    baseline = profile.evidence.baseline
    return baseline.batch_size * baseline.accumulation_steps


def measure(task: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """One task's row; what fails is a row, too."""
    row: dict[str, Any] = {
        "task": task.stem,
        "framework": "keras" if task.stem.startswith("keras") else "torch",
    }
    try:
        with tempfile.TemporaryDirectory() as folder:
            profile, path, seconds = tuned(task, Path(folder), arguments.tune)
            recipe, evidence = profile.recipe, profile.evidence
            sides = {
                APPLIED: ("--profile", path),
                PLAIN: ("--batch", own_batch(profile)),
                AT_ITS_BATCH: ("--batch", recipe.effective_batch),
            }
            rates = alternated(
                task,
                sides,
                processes=arguments.processes,
                rounds=arguments.rounds,
                seconds=arguments.seconds,
            )
    except RuntimeError as error:
        return {**row, "failed": str(error)}
    of = {name: by_process(own, arguments.rounds) for name, own in rates.items()}
    return {
        **row,
        "seconds": seconds,
        "recipe": to_plain(recipe),
        "reason": evidence.reason,
        "inconclusive": evidence.inconclusive,
        "verdict": evidence.parity.verdict,
        "parity": to_plain(evidence.parity),
        "said": to_plain(evidence.over_baseline),
        "applied_over_plain": to_plain(paired_ratio(of[APPLIED], of[PLAIN])),
        "applied_over_plain_at_its_batch": to_plain(paired_ratio(of[APPLIED], of[AT_ITS_BATCH])),
        "rates": rates,
    }


def in_a_line(row: Mapping[str, Any]) -> str:
    """A row on a terminal."""
    if "failed" in row:
        return f"{row['task']}: failed: {row['failed']}"
    return (
        f"{row['task']}: {words(row['recipe'])} in {row['seconds']:.0f} s, said "
        f"{ratio_text(row['said'])}, applied/plain {ratio_text(row['applied_over_plain'])}, "
        f"at its batch {ratio_text(row['applied_over_plain_at_its_batch'])}, {row['verdict']}"
    )


def main() -> None:
    """Run, print, and store after every task."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    known = sorted(path.stem for path in HOLDOUT.glob("*.py"))
    parser.add_argument("--tasks", nargs="+", default=known, choices=known)
    parser.add_argument("--processes", type=int, default=3, help="of each loop")
    parser.add_argument("--rounds", type=int, default=4, help="in each process")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn")
    parser.add_argument("--tune", nargs=argparse.REMAINDER, default=[], help="options of tune")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    head = machine()
    output = arguments.output or RESULTS / f"holdout-{head['date']}-{head['family']}.json"
    rows = []
    for name in arguments.tasks:
        rows.append(measure(HOLDOUT / f"{name}.py", arguments))
        print(in_a_line(rows[-1]), flush=True)
        found = {**head, "options": arguments.tune, "rows": rows}
        write_text(output, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
