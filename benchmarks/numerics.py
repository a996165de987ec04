"""Prints how well numerics are judged on the zoo: who is caught, which scale, which islands.

    python benchmarks/numerics.py                  the three tables, on tests/zoo and its truth, and
                                                   on tests/zoo/field, tasks shaped like real code
    python benchmarks/numerics.py --truth          train every task long and write truth.json
    python benchmarks/numerics.py --zoo FOLDER     other folders of task files (and truth.json)

What is broken is measured, not declared; see `zoo_truth`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import logging
import math
import os
import platform
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from zoo_truth import BATCH, POLICIES, at_tuned_scale, names, silent, tracer, write_truth

from autoprec.backends.base import Task
from autoprec.backends.torch.backend import TorchBackend
from autoprec.core.recipe import LossScale, Recipe
from autoprec.tuning.proof import Proof
from autoprec.tuning.taskfile import load_task

ZOO = Path(__file__).parent.parent / "tests" / "zoo"
FIELD = ZOO / "field"
TABLES = ("confusion", "scales", "islands")
JUDGED = ("bfloat16", "float16")


@dataclass(frozen=True)
class Job:
    """What one process does of one task; `truth` is its labels by policy, found on a CPU."""

    path: Path
    truth: Mapping[str, Any]
    seeds: tuple[int, ...]
    tables: tuple[str, ...]
    device: str = "cpu"


def run(job: Job) -> dict[str, list[dict[str, Any]]]:
    """The rows of every table that the job asks for."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # a line for every loss that is not finite
    torch.set_num_threads(1)
    task = load_task(job.path)
    makers = {"confusion": verdicts, "scales": scales, "islands": islands}
    return {
        table: [
            {"zoo": job.path.parent.name, "task": job.path.stem} | row
            for row in makers[table](task, job)
        ]
        for table in job.tables
    }


def jobs_of(
    folder: Path, only: list[str], seeds: tuple[int, ...], tables: tuple[str, ...], device: str
) -> list[Job]:
    """A job for each task of the folder, or for those that are named."""
    truth = json.loads((folder / "truth.json").read_text())["tasks"]
    return [Job(folder / f"{n}.py", truth[n], seeds, tables, device) for n in names(folder, only)]


def judged(
    jobs: list[Job],
    processes: int,
    seconds: float = math.inf,
    judge: Callable[[Job], dict[str, list[dict[str, Any]]]] = run,
) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """The tables' rows of one job after another; after so many `seconds` the rest is left out."""
    end = time.monotonic() + seconds
    with get_context("spawn").Pool(processes, maxtasksperchild=8) as pool:
        for index, found in enumerate(pool.imap(judge, jobs)):
            print(f"\r{index + 1} of {len(jobs)} tasks", end="", file=sys.stderr, flush=True)
            yield found
            if time.monotonic() > end:
                break
    print(file=sys.stderr)


# One task's rows ---------------------------------------------------------------------------------


def verdicts(task: Task, job: Job) -> Iterator[dict[str, Any]]:
    """What the tuner would decide of both 16-bit policies, at the loss scale it would tune."""
    for recipe in (Recipe(batch_size=BATCH), *POLICIES.values()):  # a process's first steps
        with contextlib.suppress(RuntimeError):  # not every kernel is there in float16
            tracer(task, device=job.device).trajectory(recipe=recipe, seed=0, steps=5)
    before = _plain_seconds(task, job.device)
    for policy in JUDGED:
        truth = job.truth[policy]
        for seed in job.seeds if truth["label"] != "unclear" else ():
            proof = Proof(tracer(task, seed, job.device))
            recipe = at_tuned_scale(proof, POLICIES[policy])
            started = time.process_time()
            verdict = proof.prove(recipe)
            seconds, after = time.process_time() - started, _plain_seconds(task, job.device)
            yield {
                "policy": policy,
                "seed": seed,
                "truth": truth["label"],
                "why": truth["why"],
                "verdict": verdict.verdict,
                "reason": verdict.reason,
                "steps": verdict.steps,
                "cost": seconds / statistics.fmean((before, after)),
            }
            before = after


def _plain_seconds(task: Task, device: str) -> float:
    """What 200 steps in float32 take of the processor, for others run beside it."""
    started = time.process_time()
    tracer(task, device=device).trajectory(recipe=Recipe(batch_size=BATCH), seed=0, steps=200)
    return time.process_time() - started


def scales(task: Task, job: Job) -> Iterator[dict[str, Any]]:
    """Skipped steps in 100 at the frameworks' scales and at the tuned one, where it is healthy."""
    if job.truth["float16"]["label"] != "healthy":
        return
    trace, recipe = tracer(task, device=job.device), POLICIES["float16"]
    tuned = at_tuned_scale(Proof(trace), recipe).loss_scale or LossScale()
    row: dict[str, Any] = {"exponent": math.log2(tuned.initial)}
    initials = {"2^15": 2.0**15, "2^16": 2.0**16, "tuned": tuned.initial}
    for name, initial in initials.items():
        scaled = replace(recipe, loss_scale=LossScale(initial=initial))
        row[name] = len(trace.trajectory(recipe=scaled, seed=1, steps=100).skipped)
    yield row


def islands(task: Task, job: Job) -> Iterator[dict[str, Any]]:
    """Mend every broken pair: trials, minimality, matrix-product work left in float32."""
    for policy in JUDGED:
        if job.truth[policy]["label"] == "broken":
            yield {"policy": policy} | mend(task, POLICIES[policy], job.device)


def mend(task: Task, recipe: Recipe, device: str = "cpu") -> dict[str, Any]:
    """Search islands for one pair; minimal if without any one of them it fails again."""
    units = TorchBackend().describe(task, device=device, seed=0, batch_size=BATCH, report=silent)
    proof = Proof(tracer(task, device=device))
    recipe = at_tuned_scale(proof, recipe)
    if proof.prove(recipe).accepted:
        return {"mended": False, "mendable": False, "minimal": False, "why": "passes as it is"}
    found = proof.find_islands(recipe, units.units)
    if found.recipe is None:
        everything = replace(recipe, float32_modules=tuple(unit.path for unit in units.units))
        mendable = proof.prove(everything).accepted
        return {"mended": False, "mendable": mendable, "minimal": False, "why": found.reason}
    paths = found.recipe.float32_modules
    fewer = [tuple(p for p in paths if p != path) for path in paths]
    minimal = not any(
        proof.prove(replace(found.recipe, float32_modules=f), until_failure=True).accepted
        for f in fewer
    )
    return {
        "mended": True,
        "mendable": True,
        "minimal": minimal,
        "trials": found.trials,
        "products": round(found.products, 4),
        "islands": paths,
    }


# The tables --------------------------------------------------------------------------------------


def confusion_table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Who is caught and who is flagged (drift or rejected), and what a proof costs."""
    wrong = [r for r in rows if (r["verdict"] != "equal") != (r["truth"] == "broken")]
    print("\n| tasks | policy | broken caught | healthy flagged |\n|---|---|---|---|")
    table = {policy: counted(rows, policy) for policy in (*JUDGED, "both")}
    zoos = {zoo: [r for r in rows if r["zoo"] == zoo] for zoo in dict.fromkeys(_zoos(rows))}
    by_zoo = {zoo: {policy: counted(own, policy) for policy in table} for zoo, own in zoos.items()}
    for zoo, counts in (by_zoo | {"all": table} if len(by_zoo) > 1 else by_zoo).items():
        for policy, row in counts.items():
            caught, flagged = share(row["broken_caught"]), share(row["healthy_flagged"])
            print(f"| {zoo} | {policy} | {caught} | {flagged} |")
    cost = _costs(rows)
    print(
        f"\nA proof takes as long as {200 * cost['median']:.0f} float32 steps in the median, at "
        f"most {200 * cost['largest']:.0f} (the median over a pair's seeds); where the verdict is "
        f"right, {200 * cost['median_where_right']:.0f}"
    )
    for steps, count in sorted(cost["followed"].items()):
        print(f"  followed for {steps} steps: {count}")
    told = [
        f"{r['task']} {r['policy']} seed {r['seed']}: {r['verdict']}, truth {r['truth']} "
        f"({r['why']}): {r['reason']}"
        for r in wrong
    ]
    for line in told:
        print(f"  {line}")
    return {
        "table": table,
        "by_zoo": by_zoo,
        "wrong": told,
        "proof_over_200_float32_steps": cost,
    }


def _zoos(rows: list[dict[str, Any]]) -> list[str]:
    return [row["zoo"] for row in rows]


def counted(rows: list[dict[str, Any]], policy: str) -> dict[str, list[int]]:
    """How many are caught of the broken, and flagged of the healthy."""
    of = [r for r in rows if policy in (r["policy"], "both")]
    return {
        name: [sum(r["verdict"] != "equal" for r in of if r["truth"] == truth), count]
        for name, truth in (("broken_caught", "broken"), ("healthy_flagged", "healthy"))
        for count in (sum(r["truth"] == truth for r in of),)
    }


def _costs(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What proofs cost: by pairs, for a single time on a shared machine is off by a tenth."""
    pairs: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        pairs.setdefault((row["task"], row["policy"]), []).append(row["cost"])
    medians = [statistics.median(costs) for costs in pairs.values()] or [0.0]
    right = [r for r in rows if (r["verdict"] != "equal") == (r["truth"] == "broken")]
    dear = sorted((row for row in rows if row["cost"] > 1), key=lambda row: -row["cost"])
    return {
        "median": statistics.median(medians),
        "median_where_right": statistics.median([r["cost"] for r in right] or [0.0]),
        "largest": max(medians),
        "followed": dict(Counter(row["steps"] for row in rows)),
        "above_one": [f"{r['task']} {r['policy']} {r['seed']}: {r['cost']:.2f}" for r in dear],
    }


def share(pair: list[int]) -> str:
    """Show a count and its share, with Wilson's interval of 95 %."""
    low, high = wilson(*pair)
    of = f"{pair[0]} of {pair[1]}"
    return f"{of} ({100 * pair[0] / max(1, pair[1]):.1f} %; {100 * low:.1f}-{100 * high:.1f} %)"


def wilson(count: int, of: int) -> tuple[float, float]:
    """Wilson's score interval of a share, 95 %."""
    if not of:
        return 0.0, 1.0
    z, p = 1.96, count / of
    middle, root = p + z * z / (2 * of), math.sqrt(p * (1 - p) / of + (z / (2 * of)) ** 2)
    base = 1 + z * z / of
    return max(0.0, (middle - z * root) / base), min(1.0, (middle + z * root) / base)


def scales_table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Skipped steps summed over the tasks that float16 can train."""
    skipped = {name: sum(r[name] for r in rows) for name in ("2^15", "2^16", "tuned")}
    print("\nSkipped steps in 100, summed over the tasks float16 can train\n")
    print("| tasks | at 2^15 | at 2^16 | tuned |\n|---|---|---|---|")
    print(f"| {len(rows)} | {skipped['2^15']} | {skipped['2^16']} | {skipped['tuned']} |")
    for row in rows:
        if row["2^15"] or row["2^16"] or row["tuned"]:
            print(f"  {row}")
    return {"skipped": skipped, "tasks": _named(rows, "task")}


def islands_table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many broken pairs islands mend, and at which price."""
    mended = [row for row in rows if row["mended"]]
    trials = [row["trials"] for row in mended] or [0]
    work = statistics.fmean([row["products"] for row in mended] or [0.0])
    print("\nIslands for the broken pairs\n")
    print("| broken | mendable | mended | minimal | trials median/max | work left in float32 |")
    print("|---|---|---|---|---|---|")
    print(
        f"| {len(rows)} | {sum(r['mendable'] for r in rows)} | {len(mended)} "
        f"| {sum(r['minimal'] for r in mended)} | {statistics.median(trials):g}/{max(trials)} "
        f"| {100 * work:.1f} % |"
    )
    for row in rows:
        print(f"  {row}")
    return _named(rows, "task", "policy")


def _named(rows: list[dict[str, Any]], *keys: str) -> dict[str, Any]:
    """The rows by the values of `keys`, which leave them."""
    return {
        " ".join(row[key] for key in keys): {k: v for k, v in row.items() if k not in keys}
        for row in rows
    }


def main() -> int:
    """Read the arguments; print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--zoo", type=Path, nargs="+", default=[ZOO, FIELD])
    parser.add_argument("--truth", action="store_true", help="train long and write truth.json")
    parser.add_argument("--only", nargs="*", default=[], help="names of tasks")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1000, 2000, 3000])
    parser.add_argument("--tables", nargs="*", choices=TABLES, default=TABLES)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="tasks at once")
    parser.add_argument("--device", default="cpu", help="torch's name for it, such as cuda")
    parser.add_argument("--output", type=Path, help="write the numbers here, as JSON")
    arguments = parser.parse_args()
    folders, only = arguments.zoo, arguments.only
    if arguments.truth:
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        torch.set_num_threads(1)
        for folder in folders:
            write_truth(folder, only)
        return 0
    seeds, tables = tuple(arguments.seeds), tuple(arguments.tables)
    jobs = [job for f in folders for job in jobs_of(f, only, seeds, tables, arguments.device)]
    found = list(judged(jobs, arguments.jobs))
    rows = {table: [row for each in found for row in each[table]] for table in tables}
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {arguments.jobs} processes of one thread each",
        "device": arguments.device,
        "software": {"python": platform.python_version(), "torch": torch.__version__},
        "seeds": list(seeds),
        "tasks": len(jobs),
    }
    makers = {"confusion": confusion_table, "scales": scales_table, "islands": islands_table}
    results |= {table: makers[table](rows[table]) for table in tables}
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
