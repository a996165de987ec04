"""Do open sessions differ for good, or does the machine? And do they change each other's speed?

    python -m benchmarks.search.session_pairs

Two sessions of one recipe take turns, in three ways: `together` in one process; `kept`, one alone
and one beside a session of float32 that takes turns, too, all of recipes that keep freed memory;
and `given back`, the same of recipes that do not. A pair's ratio is the median over its turns. If
sessions one after the other differ (`benchmarks.search.forking`) and a pair's ratio is 1 within its
error, then it is the machine that changes, within seconds, and turns in alternation take that out.

    python -m benchmarks.search.session_pairs --show FILE
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autoprec.core.device.policies import Policy
from autoprec.core.recipe import KEEP_MEMORY, Recipe
from autoprec.core.speed.timing_budget import TimingBudget
from autoprec.core.statistics import median
from benchmarks.checkout import RESULTS, ROOT
from benchmarks.provenance import machine

#: What is timed: a task of `benchmarks/tasks`, in PyTorch, a policy and a batch size.
ARMS = (
    ("lstm", "mixed_bfloat16", 1024),
    ("mlp", "mixed_bfloat16", 256),
    ("resnet", "mixed_bfloat16", 64),
)
WAYS = ("together", "kept", "given back")
PAIRS, TURNS, TURN_SECONDS = 3, 12, 0.15
_PAUSE = 0.02
#: A median absolute deviation times this is a normal distribution's standard deviation.
_DEVIATIONS = 1.4826


class Child:
    """A process with open sessions, which are timed by number."""

    def __init__(self, task: str, recipes: Sequence[tuple[str, int]], keeps: bool) -> None:
        given = json.dumps([task, recipes, keeps])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.search.session_pairs", "--serve", given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def rate(self, number: int, seconds: float = TURN_SECONDS) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(number, seconds, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("rate "):
                return float(line.split()[1])
        raise RuntimeError("the child ended; its last words are above")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(task_name: str, recipes: Sequence[tuple[str, int]], keeps: bool) -> None:
    """Open the sessions, then time the one that each line of standard input names."""
    from autoprec.backends import registry
    from autoprec.workers.task_file import load_task

    task = load_task(ROOT / "benchmarks" / "tasks" / f"{task_name}.py")
    backend = registry.load("torch")
    knobs = {KEEP_MEMORY: True} if keeps else {}
    sessions = [
        backend.open(
            task,
            Recipe(policy=Policy(policy), batch_size=batch, knobs=knobs),
            device="cpu",
            seed=0,
            report=lambda what, step: None,
        )
        for policy, batch in recipes
    ]
    for line in sys.stdin:
        number, seconds = line.split()
        budget = TimingBudget(seconds=float(seconds), min_steps=1, max_steps=1000, precision=0.0)
        print("rate", sessions[int(number)].time_steps(budget).samples_per_second, flush=True)


def pair(task: str, policy: str, batch: int, way: str) -> list[float]:
    """The log ratios of one pair, a turn each: the second session over the first."""
    own, plain = (policy, batch), ("float32", batch)
    if way == "together":
        children = [Child(task, [own, own], keeps=False)]
        one, other = (children[0], 0), (children[0], 1)
    else:
        children = [Child(task, [own], way == "kept"), Child(task, [plain, own], way == "kept")]
        one, other = (children[0], 0), (children[1], 1)
    for child, number in (one, other):
        child.rate(number, 0.3)
    found = []
    try:
        for turn in range(TURNS):
            rates = {}
            for child, number in (one, other) if turn % 2 else (other, one):
                time.sleep(_PAUSE)
                if way != "together":
                    child.rate(0, 0.0)  # warms up, or is float32's turn
                rates[child, number] = child.rate(number)
            found.append(math.log(rates[other] / rates[one]))
    finally:
        for child in children:
            child.close()
    return found


def row(found: Mapping[str, Any]) -> str:
    """The line of the table."""
    task, policy, batch = found["arm"]
    medians = [median(turns) for turns in found["ratios"]]
    mean = sum(medians) / len(medians)
    error = math.sqrt(sum((m - mean) ** 2 for m in medians) / (len(medians) - 1) / len(medians))
    turn = median(
        [
            _DEVIATIONS * median([abs(t - m) for t in turns])
            for turns, m in zip(found["ratios"], medians, strict=True)
        ]
    )
    return (
        f"{task:8s} {policy:15s} {batch:5d} {found['way']:10s} second over first "
        f"{mean:+6.1%} +- {error:5.1%}  a turn's deviation {turn:5.1%}"
    )


def main() -> None:
    """Run, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--show", type=Path, help="print the table of a stored result")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.show:
        for found in json.loads(arguments.show.read_text(encoding="utf-8"))["rows"]:
            print(row(found))
        return
    if arguments.serve:
        serve(*json.loads(arguments.serve))
        return
    head = machine()
    output = arguments.output or RESULTS / f"session_pairs-{head['date']}.json"
    rows: list[dict[str, Any]] = []
    for arm in ARMS:
        for way in WAYS:
            ratios = [pair(*arm, way) for _ in range(PAIRS)]
            rows.append({"arm": arm, "way": way, "ratios": ratios})
            print(row(rows[-1]), flush=True)
            output.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
