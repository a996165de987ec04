"""Prints how well numerics are judged on the zoo: who is caught, which scale, which islands.

    python -m benchmarks.numerics.zoo                the three tables, on the tasks and the truth
                                                     of tests/zoo and tests/zoo_keras, and of their
                                                     field folders, tasks shaped like real code
    python -m benchmarks.numerics.zoo --truth        train every task long and write truth.json
    python -m benchmarks.numerics.zoo --zoo FOLDER   other folders of task files (and truth.json);
                                                     FOLDER=1000,2000 for seeds of its own

A folder's tasks are of the framework that they import; no process imports both. What is broken is
measured, not declared; see `truth_torch` and `truth_keras`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import datetime
import itertools
import json
import logging
import math
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from autoprec.backends import registry
from autoprec.backends.protocol import Task, Tracer
from autoprec.core.recipe import LossScale, Recipe
from autoprec.tuning.proof.recipe_proof import Proof
from autoprec.workers.task_file import load_task
from benchmarks.checkout import TESTS
from benchmarks.numerics import judge
from benchmarks.numerics.judge import at_tuned_scale, silent
from benchmarks.numerics.labels import BATCH, CANNOT_RUN, POLICIES, names
from benchmarks.numerics.zoo_tables import JUDGED, confusion_table, islands_table, scales_table
from benchmarks.provenance import commit, machine

ZOO = TESTS / "zoo"
FIELD = ZOO / "field"
ZOO_KERAS = ZOO.with_name("zoo_keras")
FOLDERS = (ZOO, FIELD, ZOO_KERAS, ZOO_KERAS / "field")
TABLES = ("confusion", "scales", "islands")
LISTS = ("wrong", "unclear")
PACKAGES = {"torch": ("torch",), "keras": ("keras", "tensorflow")}


@dataclass(frozen=True)
class Job:
    """What one process does of one task; `truth` is its labels by policy, found on a CPU."""

    path: Path
    truth: Mapping[str, Any]
    seeds: tuple[int, ...]
    tables: tuple[str, ...]
    device: str = "cpu"

    @property
    def framework(self) -> str:
        """Keras or torch, by what the task file imports; nothing is run."""
        names = set()
        for node in ast.walk(ast.parse(self.path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
        return "keras" if names & {"keras", "tensorflow"} else "torch"

    @property
    def zoo(self) -> str:
        """What the tables call its folder."""
        folders = [part for part in self.path.parts[-3:-1] if "zoo" in part or part == "field"]
        return "/".join(folders) or self.path.parent.name

    def tracer(self, task: Task, seed: int = 0) -> Tracer:
        """A tracer of its framework on its device."""
        return judge.tracer(task, seed, framework=self.framework, device=self.device)


def run(
    job: Job, judge: Callable[[Task, Job], Iterator[dict[str, Any]]] | None = None
) -> dict[str, list[dict[str, Any]]]:
    """The rows of every table that the job asks for; `judge` makes those of the verdicts."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # a line for every loss that is not finite
    on_one_thread(job.framework)
    task = load_task(job.path)
    makers = {"confusion": judge or verdicts, "scales": scales, "islands": islands}
    return {
        table: [{"zoo": job.zoo, "task": job.path.stem} | row for row in makers[table](task, job)]
        for table in job.tables
    }


def on_one_thread(framework: str) -> None:
    """Compute on one thread, as several processes run at once."""
    if framework == "torch":
        import torch

        torch.set_num_threads(1)
        return
    import tensorflow as tf

    with contextlib.suppress(RuntimeError):  # it has computed already, so it was told
        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)


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
    done = itertools.count(1)
    for framework in dict.fromkeys(job.framework for job in jobs):
        own = [job for job in jobs if job.framework == framework]
        with get_context("spawn").Pool(processes, maxtasksperchild=8) as pool:
            for found in pool.imap(judge, own):
                told = f"\r{next(done)} of {len(jobs)} tasks"
                print(told, end="", file=sys.stderr, flush=True)
                yield found
                if time.monotonic() > end:
                    break
    print(file=sys.stderr)


# One task's rows ---------------------------------------------------------------------------------


def verdicts(task: Task, job: Job) -> Iterator[dict[str, Any]]:
    """What the tuner would decide of both 16-bit policies, at the loss scale it would tune."""
    for recipe in (Recipe(batch_size=BATCH), *POLICIES.values()):  # a process's first steps
        with contextlib.suppress(*CANNOT_RUN):  # not every kernel is there in float16
            job.tracer(task).trajectory(recipe=recipe, seed=0, steps=5)
    before = _plain_seconds(task, job)
    for policy in JUDGED:
        truth = job.truth[policy]
        for seed in job.seeds if truth["label"] != "unclear" else ():
            proof = Proof(job.tracer(task, seed))
            recipe = at_tuned_scale(proof, POLICIES[policy])
            started = time.process_time()
            verdict = proof.prove(recipe)
            seconds, after = time.process_time() - started, _plain_seconds(task, job)
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


def unclear(jobs: list[Job]) -> list[str]:
    """The pairs that no verdict is compared with, as long runs do not say what becomes of them."""
    return [
        f"{job.zoo} {job.path.stem} {policy}: {job.truth[policy]['why']}"
        for job in jobs
        for policy in JUDGED
        if job.truth[policy]["label"] == "unclear"
    ]


def _plain_seconds(task: Task, job: Job) -> float:
    """What 200 steps in float32 take of the processor, for others run beside it."""
    started = time.process_time()
    job.tracer(task).trajectory(recipe=Recipe(batch_size=BATCH), seed=0, steps=200)
    return time.process_time() - started


def scales(task: Task, job: Job) -> Iterator[dict[str, Any]]:
    """Skipped steps in 100 at the frameworks' scales and at the tuned one, where it is healthy."""
    if job.truth["float16"]["label"] != "healthy":
        return
    trace, recipe = job.tracer(task), POLICIES["float16"]
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
            yield {"policy": policy} | mend(task, POLICIES[policy], job)


def mend(task: Task, recipe: Recipe, job: Job) -> dict[str, Any]:
    """Search islands for one pair; minimal if without any one of them it fails again."""
    backend = registry.load(job.framework)
    units = backend.describe(task, device=job.device, seed=0, batch_size=BATCH, report=silent)
    proof = Proof(job.tracer(task))
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


def measure_truth(folder: Path, only: list[str]) -> None:
    """Write a folder's truth.json, in a process of its own."""
    process = get_context("spawn").Process(target=write_truth_of, args=(folder, only))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{folder}: the truth was not measured")


def write_truth_of(folder: Path, only: list[str]) -> None:
    """Train the folder's tasks long, by its framework."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    frameworks = {Job(folder / f"{name}.py", {}, (), ()).framework for name in names(folder, only)}
    if len(frameworks) != 1:
        raise SystemExit(f"{folder}: tasks of {len(frameworks)} frameworks, expected of one")
    (framework,) = frameworks
    on_one_thread(framework)
    if framework == "torch":
        from benchmarks.numerics.truth_torch import write_truth
    else:
        from benchmarks.numerics.truth_keras import write_truth
    write_truth(folder, only)


def _seeded(text: str, seeds: list[int]) -> tuple[Path, tuple[int, ...]]:
    """A folder and its seeds, of FOLDER or FOLDER=1000,2000."""
    folder, _, own = text.partition("=")
    return Path(folder), tuple(int(seed) for seed in own.split(",")) if own else tuple(seeds)


def _beside(known: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """What was found, with what is known of other folders where it is of the same commit."""
    if known.get("commit") != found["commit"]:
        return found
    both = known | found
    for name in ("seeds", "software"):
        both[name] = known[name] | found[name]
    both["tasks"] = known["tasks"] + found["tasks"]
    if "confusion" in known and "confusion" in found:
        ours, theirs = known["confusion"], found["confusion"]
        both["confusion"] = {
            name: ours[name] + theirs[name] if name in LISTS else ours[name] | theirs[name]
            for name in ("by_zoo", "cost_by_zoo", *LISTS)
        }
    return both


def main() -> int:
    """Read the arguments; print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--zoo", nargs="+", default=[str(f) for f in FOLDERS], metavar="FOLDER")
    parser.add_argument("--truth", action="store_true", help="train long and write truth.json")
    parser.add_argument("--only", nargs="*", default=[], help="names of tasks")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1000, 2000, 3000])
    parser.add_argument("--tables", nargs="*", choices=TABLES, default=TABLES)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="tasks at once")
    parser.add_argument("--device", default="cpu", help="torch's name for it, such as cuda")
    parser.add_argument(
        "--output",
        type=Path,
        help="write the numbers here, as JSON, beside those of other folders at the same commit",
    )
    arguments = parser.parse_args()
    folders, only = dict(_seeded(text, arguments.seeds) for text in arguments.zoo), arguments.only
    if arguments.truth:
        for folder in folders:
            measure_truth(folder, only)
        return 0
    tables, device = tuple(arguments.tables), arguments.device
    jobs = [j for f, seeds in folders.items() for j in jobs_of(f, only, seeds, tables, device)]
    found = list(judged(jobs, arguments.jobs))
    rows = {table: [row for each in found for row in each[table]] for table in tables}
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {arguments.jobs} processes of one thread each",
        "device": arguments.device,
        "family": machine(arguments.device)["family"],
        "commit": commit(),
        "software": {
            "python": platform.python_version(),
            **{
                package: metadata.version(package)
                for framework in {job.framework for job in jobs}
                for package in PACKAGES[framework]
            },
        },
        "seeds": {job.zoo: job.seeds for job in jobs},
        "tasks": len(jobs),
    }
    makers = {"confusion": confusion_table, "scales": scales_table, "islands": islands_table}
    results |= {table: makers[table](rows[table]) for table in tables}
    if "confusion" in tables:
        results["confusion"]["unclear"] = unclear(jobs)
    if arguments.output:
        known = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
        arguments.output.write_text(json.dumps(_beside(known, results), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
