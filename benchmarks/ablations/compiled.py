"""What torch.compile brings on this device: every task eager and compiled, per policy.

The recipes of a task train in alternation, each in a worker of its own, at one batch. Break-even is
after how many steps the compilation, which is timed in an empty cache, has won back its time.

    python -m benchmarks.ablations.compiled --tasks mlp encoder
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from autoprec.core.codec import to_plain
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Recipe
from autoprec.core.speed.noise import paired_ratio
from autoprec.core.speed.space import Space
from autoprec.core.speed.timing_budget import TimingBudget
from autoprec.tuning.job import TuningJob
from autoprec.tuning.race.sessions import FinalistFailed
from autoprec.workers.runner import Runner, run_trial
from benchmarks.checkout import RESULTS, TASKS
from benchmarks.interleaving import interleaved
from benchmarks.provenance import machine
from benchmarks.search.grids import make_job
from benchmarks.search.oracle_rows import ratio_text

POLICIES = (Policy.FLOAT32, Policy.MIXED_BFLOAT16)


def measure(name: str, policy: Policy, batch: int, rounds: int) -> dict[str, Any]:
    """A task under one policy, eager and compiled."""
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(temporary) / "inductor")
        job, space = make_job(TASKS / f"{name}.py", Path(temporary))
        size = max(s for s in space.batch_sizes if s <= batch)
        eager = Recipe(policy=policy, batch_size=size)
        recipes = [eager, replace(eager, compile=True)]
        row: dict[str, Any] = {"task": name, "policy": policy.value, "batch": size}
        warm = [warm_up(job, space, recipe) for recipe in recipes]
        try:
            with interleaved(job, recipes, together=True) as timing:
                timing.run(rounds)
        except FinalistFailed as failed:
            return {**row, "failed": str(failed).splitlines()[0][:160]}
    rates = [[m.samples_per_second for m in measured] for measured in timing.measured]
    steps = [median(m.step_seconds for m in measured) for measured in timing.measured]
    gained, compiling = steps[0] - steps[1], max(0.0, warm[1] - warm[0])
    return {
        **row,
        "compiled_over_eager": to_plain(paired_ratio(rates[1], rates[0])),
        "compile_seconds": compiling,
        "break_even_steps": round(compiling / gained) if gained > 0 else None,
    }


def warm_up(job: TuningJob, space: Space, recipe: Recipe) -> float:
    """The seconds before a recipe's first steady step, in a fresh process."""
    with Runner(job.settings(), job.on_progress) as runner:
        runner.load()
        outcome = run_trial(
            runner, space.point(recipe), recipe, seed=0, budget=TimingBudget(seconds=1.0)
        )
    return outcome.measurement.warmup_seconds if outcome.measurement else 0.0


def line(row: dict[str, Any]) -> str:
    """A line of the table."""
    start = f"{row['task']:10s} {row['policy']:15s} {row['batch']:5d} "
    if "failed" in row:
        return f"{start} {row['failed']}"
    steps = row["break_even_steps"]
    return (
        f"{start} {ratio_text(row['compiled_over_eager'])} "
        f"{row['compile_seconds']:7.1f} s  {'never' if steps is None else steps}"
    )


def main() -> None:
    """Run, print, and store."""
    parser = argparse.ArgumentParser(description=__doc__)
    known = sorted(p.stem for p in TASKS.glob("*.py") if not p.stem.startswith("keras"))
    parser.add_argument("--tasks", nargs="+", default=known, choices=known)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    head = machine()
    output = arguments.output or RESULTS / f"compiled-{head['date']}.json"
    print("task       policy          batch  compiled/eager    compiling  break-even steps")
    rows = []
    for name in arguments.tasks:
        for policy in POLICIES:
            rows.append(measure(name, policy, arguments.batch, arguments.rounds))
            print(line(rows[-1]), flush=True)
            output.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
