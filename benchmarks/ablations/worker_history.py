"""Whether a Keras recipe's speed depends on what ran before it in the same worker process.

    python -m benchmarks.ablations.worker_history [--tasks keras_mlp keras_conv] [--pairs 6]

Each pair is two fresh processes: one that has run nothing else, and one that has run three other
recipes. Both hold the same recipe then, and run it in turns of half a second. A pair's ratio is
that of the medians of its turns; the row has every pair's, and their pseudomedian with its 95 %
interval.
Two processes that ran the same differ by a few per cent too, by where their memory lies: so the
row also has the ratio of two that have both run nothing else, the `floor`.
Appends to benchmarks/results/after_others-*.jsonl.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from autoprec.api import probe
from autoprec.core.codec import to_plain
from autoprec.core.dtypes import Policy
from autoprec.core.measurement import Measurement
from autoprec.core.recipe import LossScale, Recipe
from autoprec.core.speed.noise import paired_ratio
from autoprec.core.speed.timing_budget import TimingBudget
from autoprec.tuning.job import Target, TuningJob
from autoprec.tuning.options import Options
from autoprec.workers.runner import Runner
from autoprec.workers.task_source import TaskSource
from benchmarks.checkout import RESULTS, TASKS
from benchmarks.provenance import machine
from benchmarks.search.oracle_rows import ratio_text

MEASURED = Recipe(batch_size=32)
OTHERS = (
    replace(MEASURED, policy=Policy.MIXED_BFLOAT16),
    replace(MEASURED, compile=True),
    Recipe(Policy.MIXED_FLOAT16, 16, 2, loss_scale=LossScale(initial=1024.0)),
)
SECONDS, TURNS = 0.5, 4


def budget(seconds: float) -> TimingBudget:
    return TimingBudget(seconds=seconds, min_steps=1, max_steps=100_000, precision=0.0)


def rates(
    job: TuningJob, before: tuple[tuple[Recipe, ...], ...], turns: int, seconds: float
) -> Any:
    """Samples per second in fresh processes that run `before` first, one for each entry."""
    runners = [job.runner() for _ in before]
    try:
        for runner, others in zip(runners, before, strict=True):
            for recipe in others:
                runner.call("measure", recipe=recipe, seed=0, budget=budget(seconds))
        for runner in runners:
            runner.call("open", name="steps", recipe=MEASURED, seed=0)
            turn(runner, seconds)
        found: list[list[float]] = [[] for _ in runners]
        for index in range(turns):
            order = list(range(len(runners)))
            for i in order if index % 2 else reversed(order):
                found[i].append(turn(runners[i], seconds).samples_per_second)
    finally:
        for runner in runners:
            runner.drop()
    return [statistics.median(each) for each in found]


def turn(runner: Runner, seconds: float) -> Measurement:
    measured: Measurement = runner.call("time", name="steps", budget=budget(seconds))
    return measured


def compare(job: TuningJob, pairs: int, turns: int, seconds: float) -> dict[str, Any]:
    """A row: after the others over alone, and alone over alone."""
    before = ((), (), OTHERS)
    found = [rates(job, before, turns, seconds) for _ in range(pairs)]
    first, second, after = ([each[i] for each in found] for i in range(len(before)))
    return {
        "recipe": to_plain(MEASURED),
        "others": [to_plain(recipe) for recipe in OTHERS],
        "alone": first,
        "after": after,
        "ratios": [a / b for a, b in zip(after, first, strict=True)],
        "after_over_alone": to_plain(paired_ratio(after, first)),
        "floor": to_plain(paired_ratio(second, first)),
    }


def line(row: dict[str, Any]) -> str:
    after, floor = (ratio_text(row[name], 3) for name in ("after_over_alone", "floor"))
    return f"{row['task']:12s} {after}  {floor}"


def main() -> None:
    """Run, print, and store."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tasks", nargs="+", default=["keras_mlp", "keras_conv"])
    parser.add_argument("--pairs", type=int, default=6, help="fewer than 6 give no 95 %% interval")
    parser.add_argument("--quick", action="store_true", help="one pair, which shows that it runs")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    head = machine()
    output = arguments.output or RESULTS / f"after_others-{head['date']}-{head['family']}.jsonl"
    pairs, turns, seconds = (1, 1, 0.05) if arguments.quick else (arguments.pairs, TURNS, SECONDS)
    target = Target(probe(device="cpu").devices[0].facts, {}, lambda known, _: known)
    print("task         after others over alone   alone over alone")
    for name in arguments.tasks:
        job = TuningJob(TaskSource(TASKS / f"{name}.py"), target, Options(), lambda event: None)
        row = {**head, "task": name, **compare(job, pairs, turns, seconds)}
        print(line(row), flush=True)
        with output.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
