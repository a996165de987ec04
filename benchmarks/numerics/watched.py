"""Prints how checks during training do on the zoo: healthy trainings left alone, broken ones told.

    python -m benchmarks.numerics.watched [--zoo FOLDER ...] [--seconds S] [--output FILE]

Every pair of task and policy of which long runs say what becomes trains for a thousand updates in a
loop that uses apply_profile, float16 at the loss scale that a proof chooses, as the long runs have
one that is found by hand; every 50th update is checked. The limits of the checks were chosen on
other trainings, those of tests/backends/torch/watch. An alarm is a fault in two checks in a row, or
one that noise cannot excuse. What breaks in its first steps is the check's before training; it is
here to see that this one would tell it as well. What breaks late is a matter of `late_breaks`.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import logging
import math
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from autoprec import apply_profile
from autoprec.backends.protocol import Task
from autoprec.core.numerics.watching import WatchedStep
from autoprec.core.recipe import Recipe
from autoprec.tuning.proof.recipe_proof import Proof
from autoprec.workers.task_file import load_task
from benchmarks.numerics.judge import at_tuned_scale
from benchmarks.numerics.labels import BATCH, CANNOT_RUN, POLICIES
from benchmarks.numerics.zoo import FOLDERS, Job, jobs_of, judged, on_one_thread
from benchmarks.numerics.zoo_tables import JUDGED, share
from benchmarks.provenance import commit, machine

UPDATES, EVERY, SEED = 1000, 50, 3000
NUMBERS = ("outputs", "loss", "gradient")


def watched_in(job: Job, *, only_healthy: bool = False) -> dict[str, list[dict[str, Any]]]:
    """What checks found in the trainings of one task, a row for each policy whose truth is known.

    A policy under which the task raises has none: nothing is trained there.
    """
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    on_one_thread(job.framework)
    task, rows = load_task(job.path), []
    train = torch_training if job.framework == "torch" else keras_training
    for policy in JUDGED:
        truth = job.truth[policy]["label"]
        if truth == "healthy" or (truth == "broken" and not only_healthy):
            try:
                checks = train(task, trained_recipe(job, task, policy))
            except CANNOT_RUN:
                continue
            row = {"zoo": job.zoo, "task": job.path.stem, "policy": policy, "truth": truth}
            rows.append(row | summary(checks))
    return {"rows": rows}


def trained_recipe(job: Job, task: Task, policy: str) -> Recipe:
    """The recipe of a policy as a profile has it: at the loss scale of the task."""
    return at_tuned_scale(Proof(job.tracer(task, SEED)), POLICIES[policy])


def torch_training(task: Task, recipe: Recipe) -> tuple[WatchedStep, ...]:
    """Train by a loop of the usual lines; return the checks."""
    from autoprec.backends.torch.train.task_runner import (
        batches,
        build_model,
        build_optimizer,
        compute_loss,
    )

    model = build_model(task, "cpu", SEED)
    optimizer = build_optimizer(task, model)
    precision = apply_profile(
        recipe, model=model, optimizer=optimizer, device="cpu", watch="warn", watch_every=EVERY
    )
    for batch in itertools.islice(batches(task, BATCH, SEED, repeat=True), UPDATES):
        precision.backward(compute_loss(task, model, batch, precision))
        if task.clip_grad_norm is not None:
            precision.clip_grad_norm_(task.clip_grad_norm)
        precision.step()
    return precision.watched


def keras_training(task: Task, recipe: Recipe) -> tuple[WatchedStep, ...]:
    """Train by `fit`; return the checks."""
    from autoprec.backends.keras.train.task_runner import build_model

    def endless() -> Iterator[Any]:
        while True:
            for batch in task.build_data(BATCH):
                yield tuple(batch)

    model = build_model(task, SEED, next(endless()))
    precision = apply_profile(recipe, model=model, watch="warn", watch_every=EVERY)
    model.fit(endless(), steps_per_epoch=UPDATES, verbose=0)
    checks: tuple[WatchedStep, ...] = precision.watched
    return checks


def summary(checks: Sequence[WatchedStep]) -> dict[str, Any]:
    """When the first alarm came and what it said, how many checks failed, and the largest numbers.

    `alarm` is None where there was none; a number is None where no check knows it.
    """
    alarm = next((each for each in checks if each.action), None)
    made = [each for each in checks if each.samples]
    found: dict[str, Any] = {
        "checks": len(made),
        "failed": sum(bool(each.problem) for each in made),
        "alarm": alarm and alarm.updates,
        "said": alarm.problem if alarm else "",
        "not_checked": next((each.not_checked for each in checks if each.not_checked), ""),
    }
    for name in NUMBERS:
        known = [abs(v) for each in made if (v := getattr(each, name)) is not None]
        found[name] = round(max(known), 4) if known else None
    return found


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The table's lines, then every healthy training with an alarm and every unchecked one."""
    yield "| framework | healthy, with an alarm | broken, with an alarm |\n|---|---|---|"
    for keras in (False, True):
        own = [row for row in rows if ("keras" in row["zoo"]) is keras and row["checks"]]
        if own:
            told = (share(_alarmed(own, truth)) for truth in ("healthy", "broken"))
            yield f"| {'Keras' if keras else 'torch'} | {' | '.join(told)} |"
    for row in rows:
        name = f"{row['zoo']} {row['task']} {row['policy']}"
        if row["truth"] == "healthy" and row["alarm"]:
            yield f"  {name}, healthy: alarm at {row['alarm']}: {row['said']}"
        if not row["checks"]:
            yield f"  {name}, {row['truth']}: not checked: {row['not_checked']}"


def _alarmed(rows: Iterable[dict[str, Any]], truth: str) -> list[int]:
    of = [row for row in rows if row["truth"] == truth]
    return [sum(row["alarm"] is not None for row in of), len(of)]


def main() -> int:
    """Read the arguments; print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--zoo", nargs="+", type=Path, default=FOLDERS, metavar="FOLDER")
    parser.add_argument("--only", nargs="*", default=[], help="names of tasks")
    parser.add_argument("--healthy", action="store_true", help="only what is healthy")
    parser.add_argument("--jobs", type=int, default=1, help="tasks at once")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no task later")
    parser.add_argument("--output", type=Path, help="write the numbers here, as JSON")
    arguments = parser.parse_args()
    only, seconds = arguments.only, arguments.seconds
    jobs = [job for f in arguments.zoo for job in jobs_of(f, only, (SEED,), (), "cpu")]
    judge = partial(watched_in, only_healthy=arguments.healthy)
    found = judged(jobs, arguments.jobs, seconds, judge=judge)
    rows = [row for each in found for row in each["rows"]]
    print("\n".join(table(rows)))
    if arguments.output:
        head = {"date": datetime.date.today().isoformat(), "commit": commit(), "seed": SEED}
        head |= {"family": machine("cpu")["family"], "updates": UPDATES, "every": EVERY}
        arguments.output.write_text(json.dumps(head | {"rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
