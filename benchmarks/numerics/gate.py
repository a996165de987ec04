"""Chooses the tasks whose proofs are made in every run of the tests: each folder's cheapest.

    python -m benchmarks.numerics.gate tests/zoo=0.5 tests/zoo/field=0.34

Each folder is given with the share of its tasks that is chosen. What a task costs is measured: its
loss scale and its proof in both 16-bit policies. Verdicts have no say. What is chosen is written to
gate.json in the first folder.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import logging
import math
import os
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from autoprec.tuning.proof.recipe_proof import Proof
from autoprec.workers.task_file import load_task
from benchmarks.numerics.judge import at_tuned_scale
from benchmarks.numerics.labels import CANNOT_RUN, POLICIES
from benchmarks.numerics.zoo import Job, jobs_of, judged, on_one_thread
from benchmarks.numerics.zoo_tables import JUDGED

WHAT = (
    "The tasks whose proofs are made in every run of the tests: of each folder this share, those "
    "whose proofs in both 16-bit policies took the fewest seconds of one processor. What is "
    "expected of them is in each folder's truth.json."
)


def timed(job: Job) -> dict[str, list[dict[str, Any]]]:
    """What the proofs of one task take of the processor."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # a line for every loss that is not finite
    on_one_thread(job.framework)
    task = load_task(job.path)
    started = time.process_time()
    for policy in JUDGED:
        proof = Proof(job.tracer(task, job.seeds[0]))
        with contextlib.suppress(*CANNOT_RUN):
            proof.prove(at_tuned_scale(proof, POLICIES[policy]))
    row = {"zoo": job.zoo, "task": job.path.stem, "seconds": time.process_time() - started}
    return {"rows": [row]}


def chosen(rows: Sequence[Mapping[str, Any]], shares: Mapping[str, float]) -> dict[str, Any]:
    """The seconds of each folder's cheapest tasks, so many that they are its share or more."""
    found = {}
    for zoo, share in shares.items():
        own = sorted((row["seconds"], row["task"]) for row in rows if row["zoo"] == zoo)
        cheapest = own[: math.ceil(share * len(own))]
        found[zoo] = {task: round(seconds, 2) for seconds, task in cheapest}
    return found


def main() -> int:
    """Read the arguments, time the proofs and write what is chosen."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("zoo", nargs="+", metavar="FOLDER=SHARE")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="tasks at once")
    arguments = parser.parse_args()
    given = [text.rpartition("=") for text in arguments.zoo]
    of = partial(jobs_of, only=[], seeds=(arguments.seed,), tables=(), device="cpu")
    jobs = {folder: of(Path(folder)) for folder, _, _ in given}
    shares = {jobs[folder][0].zoo: float(share) for folder, _, share in given}
    every = [job for own in jobs.values() for job in own]
    rows = [row for found in judged(every, arguments.jobs, judge=timed) for row in found["rows"]]
    measured = {"date": datetime.date.today().isoformat(), "seed": arguments.seed}
    measured |= {"tasks": {zoo: sum(row["zoo"] == zoo for row in rows) for zoo in shares}}
    gate = {"what": WHAT, "measured": measured, "shares": shares, "seconds": chosen(rows, shares)}
    (Path(given[0][0]) / "gate.json").write_text(json.dumps(gate, indent=1) + "\n")
    for zoo, tasks in gate["seconds"].items():
        print(f"\n{zoo}: {len(tasks)} tasks, {sum(tasks.values()):.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
