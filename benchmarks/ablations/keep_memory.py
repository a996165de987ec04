"""What keeping freed memory brings (`keep_memory`): a training step with it over one without.

For every PyTorch task, plain float32 and bfloat16, two processes in alternation, each for two
seconds at a time, for a training runs on without pauses; and the peak memory of both. Prints a
table and writes it to benchmarks/results/.

    python -m benchmarks.ablations.keep_memory --tasks mlp resnet
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from autoprec.core.codec import to_plain
from autoprec.core.dtypes import Policy
from autoprec.core.measurement import Measurement
from autoprec.core.recipe import KEEP_MEMORY, Recipe
from autoprec.core.speed.noise import paired_ratio
from autoprec.core.speed.timing_budget import TimingBudget
from autoprec.tuning.job import TuningJob
from autoprec.workers.runner import Runner
from benchmarks.checkout import RESULTS, TASKS
from benchmarks.provenance import machine
from benchmarks.search.grids import make_job
from benchmarks.search.oracle_rows import ratio_text

POLICIES = (Policy.FLOAT32, Policy.MIXED_BFLOAT16)
BUDGET = TimingBudget(seconds=2.0, min_steps=1, max_steps=100_000, precision=0.0)


def compare(job: TuningJob, recipe: Recipe, rounds: int) -> dict[str, Any]:
    """Steps without and with freed memory kept."""
    recipes = (recipe, replace(recipe, knobs={KEEP_MEMORY: True}))
    runners = [job.runner() for _ in recipes]
    try:
        for runner, each in zip(runners, recipes, strict=True):
            runner.call("open", name="steps", recipe=each, seed=0)
            turn(runner)
        measured = [[turn(runner) for runner in runners] for _ in range(rounds)]
    finally:
        for runner in runners:
            runner.drop()
    plain, kept = ([m[i] for m in measured] for i in range(2))
    rates = [[m.samples_per_second for m in each] for each in (kept, plain)]
    return {
        "policy": recipe.policy.value,
        "batch": recipe.batch_size,
        "kept_over_plain": to_plain(paired_ratio(*rates)),
        "peak_bytes": [max(m.peak_memory_bytes for m in each) for each in (plain, kept)],
    }


def turn(runner: Runner) -> Measurement:
    """Two seconds of steps."""
    measured: Measurement = runner.call("time", name="steps", budget=BUDGET)
    return measured


def line(row: dict[str, Any]) -> str:
    """A line of the table."""
    ratio, (plain, kept) = row["kept_over_plain"], (b / 2**30 for b in row["peak_bytes"])
    return (
        f"{row['task']:10s} {row['policy']:15s} {row['batch']:5d}  {ratio_text(ratio)}  "
        f"{plain:5.2f} GiB {kept:5.2f} GiB"
    )


def main() -> None:
    """Run, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    known = sorted(p.stem for p in TASKS.glob("*.py") if not p.stem.startswith("keras"))
    parser.add_argument("--tasks", nargs="+", default=known, choices=known)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    head = machine()
    output = arguments.output or RESULTS / f"keep_memory-{head['date']}.json"
    print("task       policy          batch  kept/plain         peak plain  kept")
    rows = []
    for name in arguments.tasks:
        with tempfile.TemporaryDirectory() as temporary:
            job, _ = make_job(TASKS / f"{name}.py", Path(temporary))
            for policy in POLICIES:
                recipe = Recipe(policy=policy, batch_size=arguments.batch)
                rows.append({"task": name, **compare(job, recipe, arguments.rounds)})
                print(line(rows[-1]), flush=True)
                text = json.dumps({**head, "rows": rows}, indent=1)
                output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
