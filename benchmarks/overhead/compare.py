"""What apply_profile costs per training step, against the same step written by hand.

    python -m benchmarks.overhead.compare [--processes 9] [--seconds 1] [--ways torch fit]

PyTorch's loop (`torch_steps`) and Keras's fit, train_on_batch and custom loop (`keras_steps`)
at steps of 0.3 to 100 ms, and a loop of PyTorch's with checks during training against one without
(its steps between the checks), in several processes a case: each gives one pair of medians at every
length, and a line through its costs gives its fixed cost. Printed and written are the medians over
processes with their 95 % intervals, which leave out the lowest and the highest from nine processes
on: one disturbed process decides nothing. What is promised (`fit`) is kept where the upper end is
within. The exit code is 1 where an upper end is above, also where the interval holds the promised
number and nothing is resolved.

One thread by default: two threads on a busy machine scatter by far more than what is measured here.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autoprec.core.dtypes import Policy
from autoprec.yaml_files import write_text
from benchmarks.checkout import RESULTS, child_environment
from benchmarks.overhead.fit import (
    BROKEN,
    FIT,
    TORCH,
    UNRESOLVED,
    WATCHED,
    Pair,
    by_target,
    case,
    fixed,
    in_words,
    not_kept,
)
from benchmarks.provenance import machine
from benchmarks.report.speed import microseconds
from benchmarks.search.oracle_rows import ratio_text

#: By option: the way's name, its program with its words, and its policies.
BOTH = (Policy.FLOAT32.value, Policy.MIXED_BFLOAT16.value)
LOW = (Policy.MIXED_BFLOAT16.value, Policy.MIXED_FLOAT16.value)
WAYS: dict[str, tuple[str, str, tuple[str, ...], tuple[str, ...]]] = {
    "torch": (TORCH, "torch_steps", (), (*BOTH, Policy.MIXED_FLOAT16.value)),
    "watch": (WATCHED, "torch_steps", ("--watched",), LOW),
    "fit": (FIT, "keras_steps", ("fit",), BOTH),
    "train_on_batch": ("Keras train_on_batch", "keras_steps", ("train_on_batch",), BOTH),
    "loop": ("Keras custom loop", "keras_steps", ("custom loop",), BOTH),
}
MILLISECONDS = (0.3, 1.0, 2.0, 5.0, 20.0, 100.0)


def one_process(option: str, policy: str, arguments: argparse.Namespace) -> list[Pair]:
    """A case in a process of its own."""
    _, program, words, _ = WAYS[option]
    asked = ["--milliseconds", *map(str, arguments.milliseconds)]
    asked += ["--seconds", str(arguments.seconds), "--rounds", str(arguments.rounds)]
    asked += ["--threads", str(arguments.threads)]
    threads = {"OMP_NUM_THREADS": str(arguments.threads), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.overhead.{program}", policy, *words, *asked],
        env=child_environment(**threads),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{program} {policy} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return [Pair(**row) for row in json.loads(done.stdout.splitlines()[-1])]


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Every way and policy, in as many processes as asked for."""
    cases, lines = [], []
    for option in arguments.ways:
        way, _, _, policies = WAYS[option]
        for policy in policies:
            found = [one_process(option, policy, arguments) for _ in range(arguments.processes)]
            lengths = by_target(found)
            cases += [case(way, policy, pairs) for pairs in lengths]
            for row in cases[-len(lengths) :]:
                print(in_a_line(row), flush=True)
            if len(lengths) > 1:
                lines.append(fixed(way, policy, found))
                print(
                    f"{way:20s} {policy:14s} fixed {microseconds(lines[-1]['fixed'])}", flush=True
                )
    return {"cases": cases, "fixed": lines}


def with_other_ways(found: dict[str, Any], earlier: dict[str, Any]) -> dict[str, Any]:
    """The ways measured now, after those that the file has of the same machine and options.

    A row of another commit names it.
    """
    rows, of_its_own = ("cases", "fixed"), ("date", "commit")

    def shared(each: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in each.items() if name not in (*rows, *of_its_own)}

    if shared(found) != shared(earlier):
        return found
    now = {row["way"] for row in found["cases"]}
    other = {} if earlier["commit"] == found["commit"] else {"commit": earlier["commit"]}
    kept = {name: [{**other, **r} for r in earlier[name] if r["way"] not in now] for name in rows}
    return {**found, **{name: kept[name] + found[name] for name in rows}}


def in_a_line(row: dict[str, Any]) -> str:
    """A case on a terminal."""
    return (
        f"{row['way']:20s} {row['policy']:14s} {row['batch_size']:6d} "
        f"{row['step_milliseconds']:8.2f} ms {ratio_text(row['ratio'], 4)} "
        f"{microseconds(row['cost'])}"
    )


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print, store, and say which promises are broken or unresolved."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--processes", type=int, default=9, help="of each case")
    parser.add_argument("--seconds", type=float, default=1.0, help="time of one round")
    parser.add_argument("--rounds", type=int, default=3, help="in each process")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--milliseconds", type=float, nargs="+", default=[*MILLISECONDS])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(words)
    head = machine()
    asked = {n: getattr(arguments, n) for n in ("processes", "rounds", "seconds", "threads")}
    found = {**head, **asked, **measure(arguments)}
    output = arguments.output or RESULTS / f"overhead-{head['date']}-{head['family']}.json"
    if output.exists():
        found = with_other_ways(found, json.loads(output.read_text()))
    write_text(output, json.dumps(found, indent=1) + "\n")
    for judgement in (UNRESOLVED, BROKEN):
        name = "not kept" if judgement == BROKEN else judgement
        for line in in_words(found, judgement):
            print(f"{name}: {line}")
    return 1 if not_kept(found) else 0


if __name__ == "__main__":
    raise SystemExit(main())
