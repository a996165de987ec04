"""Proves tasks twice, alone and beside processes that keep every core busy: nothing may differ.

    python -m benchmarks.numerics.repeated_verdicts [--output FILE]

Verdict, reason and every number of both 16-bit policies are compared, for each of 24 tasks of the
zoo; how many steps a proof takes is chosen anew each time, by the pace of that moment.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autoprec.backends.protocol import Task
from autoprec.core.codec import to_plain
from autoprec.tuning.proof.recipe_proof import Proof
from autoprec.workers.task_file import load_task
from benchmarks.numerics.judge import at_tuned_scale, tracer
from benchmarks.numerics.labels import POLICIES, names
from benchmarks.numerics.zoo import FIELD, ZOO
from benchmarks.numerics.zoo_tables import JUDGED, share

TASKS = 24


def chosen(count: int) -> list[Path]:
    """So many tasks, half of them shaped like real code, evenly through both folders."""
    picked = []
    for folder in (ZOO, FIELD):
        known, half = names(folder, []), count // 2
        picked += [folder / f"{known[i * len(known) // half]}.py" for i in range(half)]
    return picked


@contextlib.contextmanager
def busy(cores: int) -> Iterator[None]:
    """Keep so many cores busy with processes of ordinary priority."""
    spin = [sys.executable, "-c", "while True: sum(range(10**6))"]
    processes = [subprocess.Popen(spin) for _ in range(cores)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def verdicts(task: Task, seed: int) -> dict[str, Any]:
    """The verdict of each policy, but for what it took."""
    found = {}
    for policy in JUDGED:
        proof = Proof(tracer(task, seed))
        verdict = proof.prove(at_tuned_scale(proof, POLICIES[policy]))
        found[policy] = to_plain(replace(verdict, seconds=0.0))
    return found


def main() -> int:
    """Read the arguments; print what differs; fail where anything does."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tasks", type=int, default=TASKS)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--output", type=Path, help="write the verdicts here, as JSON")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # a line for every loss that is not finite
    torch.set_num_threads(1)
    cores = os.cpu_count() or 1
    rows = []
    for path in chosen(arguments.tasks):
        task = load_task(path)
        alone = verdicts(task, arguments.seed)
        with busy(cores):
            beside = verdicts(task, arguments.seed)
        same = alone == beside
        told = ", ".join(f"{p} {v['verdict']} ({v['steps']} steps)" for p, v in alone.items())
        print(f"{path.stem:24} {'the same' if same else 'DIFFERENT'}: {told}", flush=True)
        rows.append({"task": path.stem, "same": same, "alone": alone, "beside": beside})
    count = sum(row["same"] for row in rows)
    print(f"\nthe same beside {cores} busy processes: {share([count, len(rows)])}")
    if arguments.output:
        head = {"date": datetime.date.today().isoformat(), "torch": torch.__version__}
        arguments.output.write_text(json.dumps(head | {"tasks": rows}, indent=1) + "\n")
    return 0 if count == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
