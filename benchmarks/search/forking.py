"""Do turns in forked processes vary as turns in spawned ones, and how much do processes differ?

    python -m benchmarks.search.forking --turns 16

A turn is one process that loads a task, opens two sessions one after the other and times each. It
is spawned (a new interpreter imports the framework), or forked from one of two servers, which
imported the framework and did no arithmetic. Spawned and forked turns alternate. Of each
way: the median rate, and how much log rates differ between processes and between the sessions of a
process. Single turns may be off by an order of magnitude, so deviations are robust ones. The last
line of an arm says how many times as fast forked turns are, and how many times as much they differ,
each with the interval of 95 % of draws of as many processes with replacement.

    python -m benchmarks.search.forking --show FILE

Final rounds have new processes so that their interval holds in the next one. Forked turns do for
that where both intervals hold 1 and are narrow. On an Emerald Rapids (14 turns each way, some 3 s
shorter forked) a ResNet's forked turns were 1.10x (1.00-1.23) as fast, an mlp's in bfloat16 0.91x
(0.85-1.00), and how much turns differ is known to a factor of three at best: turns are spawned.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pkgutil
import random
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from autoprec.core.device.policies import Policy
from autoprec.core.recipe import Recipe
from autoprec.core.speed.timing_budget import TimingBudget
from autoprec.core.statistics import median
from benchmarks.checkout import RESULTS, ROOT
from benchmarks.provenance import machine

#: What is timed: a task of `benchmarks/tasks`, its framework, a policy and a batch size.
ARMS = (
    ("mlp", "torch", "float32", 32),
    ("mlp", "torch", "mixed_bfloat16", 256),
    ("lstm", "torch", "float32", 32),
    ("resnet", "torch", "float32", 32),
    ("keras_mlp", "keras", "float32", 32),
)
SERVERS, SESSIONS = 2, 2
_BUDGET = TimingBudget(seconds=0.5, min_steps=3, max_steps=1000, precision=0.0)
#: A median absolute deviation times this is a normal distribution's standard deviation.
_DEVIATIONS = 1.4826
#: How often processes are drawn anew for an interval, and where in the draws it ends.
_DRAWS, _ENDS = 2000, (0.025, 0.975)
_WARM = TimingBudget(seconds=0.3, min_steps=1, max_steps=1000, precision=0.0)


def turn(task_name: str, framework: str, policy: str, batch: int) -> list[float]:
    """The rates of the sessions of one process, in samples a second."""
    from autoprec.backends import registry
    from autoprec.workers.task_file import load_task

    task = load_task(ROOT / "benchmarks" / "tasks" / f"{task_name}.py")
    backend = registry.load(framework)
    recipe = Recipe(policy=Policy(policy), batch_size=batch)
    rates = []
    for _ in range(SESSIONS):
        session = backend.open(task, recipe, device="cpu", seed=0, report=lambda what, step: None)
        session.time_steps(_WARM)
        rates.append(session.time_steps(_BUDGET).samples_per_second)
        session.close()
    return rates


def serve(framework: str) -> None:
    """Import the framework, then fork a turn for every line of standard input."""
    package = f"autoprec.backends.{framework}"
    for found in pkgutil.walk_packages(import_module(package).__path__, f"{package}."):
        import_module(found.name)
    print(json.dumps({"threads": len(os.listdir("/proc/self/task"))}), flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            print(json.dumps(turn(*json.loads(line))), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


def _spawn(arm: Sequence[Any]) -> list[float]:
    command = [sys.executable, "-m", "benchmarks.search.forking", "--turn", json.dumps(arm)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    rates: list[float] = json.loads(done.stdout.splitlines()[-1])
    return rates


class Server:
    """A process that forks turns."""

    def __init__(self, framework: str) -> None:
        command = [sys.executable, "-m", "benchmarks.search.forking", "--serve", framework]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.threads: int = self._read()["threads"]

    def turn(self, arm: Sequence[Any]) -> list[float]:
        assert self._process.stdin is not None
        print(json.dumps(arm), file=self._process.stdin, flush=True)
        rates: list[float] = self._read()
        return rates

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(("[", "{")):
                return json.loads(line)
        raise RuntimeError("the server ended; its last words are above")


def components(turns: Sequence[Sequence[float]]) -> dict[str, float]:
    """The median rate, and standard deviations of log rates by median absolute deviations.

    `session_sd` is between sessions of a process; `mean_sd` of the mean of a process's sessions,
    and `process_sd` what processes add to it.
    """
    logs = [[math.log(rate) for rate in rates] for rates in turns]
    means = [sum(each) / len(each) for each in logs]
    session = _DEVIATIONS * median([abs(a - b) for a, b in logs]) / math.sqrt(2)
    mean = _DEVIATIONS * median([abs(m - median(means)) for m in means])
    return {
        "rate": median([rate for rates in turns for rate in rates]),
        "session_sd": session,
        "process_sd": math.sqrt(max(0.0, mean**2 - session**2 / SESSIONS)),
        "mean_sd": mean,
    }


def compare(
    spawned: Sequence[Sequence[float]], forked: Sequence[Sequence[float]]
) -> dict[str, tuple[float, float, float]]:
    """How many times as fast forked turns are, and how much they differ: at, low and high."""
    chance = random.Random(0)
    found: dict[str, list[float]] = {"rate": [], "mean_sd": []}
    for _ in range(_DRAWS):
        drawn = [components(chance.choices(turns, k=len(turns))) for turns in (spawned, forked)]
        for what, ratios in found.items():
            before, after = (each[what] for each in drawn)
            if before and after:  # as many turns of one rate are none to tell from
                ratios.append(after / before)
    one, other = components(spawned), components(forked)
    intervals = {}
    for what, ratios in found.items():
        if ratios and one[what]:
            low, high = (sorted(ratios)[int(end * len(ratios))] for end in _ENDS)
            intervals[what] = other[what] / one[what], low, high
    return intervals


def measure(arm: tuple[str, str, str, int], turns: int) -> dict[str, Any]:
    """All turns of one arm, spawned and forked ones in alternation."""
    servers = [Server(arm[1]) for _ in range(SERVERS)]
    rates: dict[str, list[list[float]]] = {"spawned": [], "forked": []}
    seconds = {"spawned": 0.0, "forked": 0.0}
    try:
        for number in range(2 * turns):
            way = "spawned" if number % 4 in {0, 3} else "forked"
            began = time.monotonic()
            server = servers[len(rates["forked"]) % SERVERS]
            rates[way].append(_spawn(arm) if way == "spawned" else server.turn(arm))
            seconds[way] += time.monotonic() - began
    finally:
        for server in servers:
            server.close()
    ways: Mapping[str, Any] = {
        way: {"seconds": seconds[way] / turns, "rates": rates[way]} for way in rates
    }
    return {"arm": arm, "server_threads": servers[0].threads, **ways}


def row(found: Mapping[str, Any]) -> str:
    """The lines of the table."""
    name, _, policy, batch = found["arm"]
    lines = []
    for way in ("spawned", "forked"):
        of = found[way] | components(found[way]["rates"])
        lines.append(
            f"{name:10s} {policy:15s} {batch:5d} {way:8s} {of['rate']:9.0f}/s  "
            f"process {of['process_sd']:6.1%}  session {of['session_sd']:6.1%}  "
            f"mean of a process {of['mean_sd']:6.1%}  {of['seconds']:5.1f} s"
        )
    both = compare(found["spawned"]["rates"], found["forked"]["rates"])
    words = {"rate": "as fast", "mean_sd": "as far apart"}
    said = [f"{at:.2f}x ({low:.2f}-{high:.2f}) {words[w]}" for w, (at, low, high) in both.items()]
    lines.append(f"{'':32s} forked over spawned: {', '.join(said)}")
    return "\n".join(lines)


def main() -> None:
    """Run, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--show", type=Path, help="print the table of a stored result")
    parser.add_argument("--turn", help=argparse.SUPPRESS)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.show:
        for found in json.loads(arguments.show.read_text(encoding="utf-8"))["rows"]:
            print(row(found))
        return
    if arguments.turn:
        print(json.dumps(turn(*json.loads(arguments.turn))))
        return
    if arguments.serve:
        serve(arguments.serve)
        return
    head = machine()
    output = arguments.output or RESULTS / f"forking-{head['date']}.json"
    rows = []
    for arm in ARMS:
        rows.append(measure(arm, arguments.turns))
        print(row(rows[-1]), flush=True)
        output.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
