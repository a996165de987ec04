"""Counts the training steps that proofs take on the zoo, and says which verdicts differ.

    python -m benchmarks.numerics.proof_costs --output FILE       prove, count, and write both
    python -m benchmarks.numerics.proof_costs --compare OLD NEW   print the costs of two such files
                                                                  and every verdict that differs

A step is a forward and a backward pass of one batch, in training or at a checkpoint's weights; a
forward pass alone counts as a third. All are counted: those that tell the pace, and those that
choose a loss scale, too. The counting is done here, around the models that a tracer builds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import statistics
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from autoprec.backends.protocol import Tracer
from autoprec.core.numerics.proof_steps import PROOF_LENGTHS
from autoprec.core.recipe import Recipe
from autoprec.tuning.proof.recipe_proof import Proof
from autoprec.workers.task_file import load_task
from benchmarks.numerics.judge import at_tuned_scale
from benchmarks.numerics.labels import BATCH, POLICIES
from benchmarks.numerics.zoo import FOLDERS, ZOO, Job, jobs_of, judged, on_one_thread
from benchmarks.numerics.zoo_tables import JUDGED
from benchmarks.provenance import machine

FORWARD = 1 / 3
"""What a forward pass counts, in steps."""


class CountedTrainee:
    """A model under a recipe that counts its steps by what they are for."""

    def __init__(self, trainee: Any, name: str, counts: Counter[str]) -> None:
        self._trainee, self._name, self._counts = trainee, name, counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainee, name)

    def _count(self, what: str, steps: float = 1) -> None:
        self._counts[f"{self._name} {what}"] += steps  # type: ignore[assignment]

    def add_noise(self, *arguments: Any) -> None:
        """From here on its steps are those of noise."""
        self._name = "noisy float32"
        self._trainee.add_noise(*arguments)

    def train_step(self, batches: Iterator[Any], *arguments: Any, **more: Any) -> Any:
        """Count every micro-batch."""
        held = list(batches)
        self._count("training", len(held))
        return self._trainee.train_step(iter(held), *arguments, **more)

    def loss(self, *arguments: Any) -> Any:
        """Count a forward pass."""
        self._count("forward", FORWARD)
        return self._trainee.loss(*arguments)

    def loss_and_gradient(self, *arguments: Any) -> Any:
        """Count a single step."""
        self._count("single steps")
        return self._trainee.loss_and_gradient(*arguments)

    def loss_and_gradient_watched(self, *arguments: Any) -> Any:
        """Count a single step."""
        self._count("single steps")
        return self._trainee.loss_and_gradient_watched(*arguments)

    def evaluate_batch(self, *arguments: Any) -> Any:
        """Count a forward pass."""
        self._count("evaluation", FORWARD)
        return self._trainee.evaluate_batch(*arguments)


class CountedFramework:
    """What a framework does for a trace, with every step counted."""

    def __init__(self, framework: Any) -> None:
        self._framework = framework
        self.counts: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._framework, name)

    @contextlib.contextmanager
    def trainee(
        self, recipe: Recipe, seed: int, batch: Any, *, reference: bool
    ) -> Iterator[CountedTrainee]:
        """Build one that counts."""
        name = "candidate" if recipe.policy.mixed else "float32"
        with self._framework.trainee(recipe, seed, batch, reference=reference) as trainee:
            yield CountedTrainee(trainee, name, self.counts)

    def count_exponents(self, *arguments: Any) -> None:
        """Count the backward pass that chooses a loss scale."""
        self.counts["loss scale"] += 1
        self._framework.count_exponents(*arguments)


def counted(tracer: Any) -> tuple[Tracer, Counter[str]]:
    """The tracer, which counts its steps from here on, and the counts."""
    tracer._framework = CountedFramework(tracer._framework)
    return tracer, tracer._framework.counts


def costs(
    job: Job, batch: int = BATCH, trained: int | None = None
) -> dict[str, list[dict[str, Any]]]:
    """The verdict of both 16-bit policies of one task at a batch, and the steps that it took.

    With `trained` its trainings are made at that smaller batch, of the longest proof's steps.
    """
    smaller = {} if trained is None else {"steps": PROOF_LENGTHS[-1], "trained_batch": trained}
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    on_one_thread(job.framework)
    task, rows = load_task(job.path), []
    for policy in JUDGED:
        label = job.truth[policy]["label"]
        tracer, counts = counted(job.tracer(task, job.seeds[0]))
        proof = Proof(tracer, **smaller)
        verdict = proof.prove(at_tuned_scale(proof, replace(POLICIES[policy], batch_size=batch)))
        rows.append(
            {
                "zoo": job.zoo,
                "task": job.path.stem,
                "policy": policy,
                "truth": label,
                "verdict": verdict.verdict,
                "reason": verdict.reason,
                "steps": verdict.steps,
                "most_steps": verdict.most_steps,
                "cost": round(sum(counts.values()), 1),
                "by_kind": {name: round(steps, 1) for name, steps in sorted(counts.items())},
            }
        )
    return {"rows": rows}


def median_costs(rows: Sequence[dict[str, Any]]) -> list[str]:
    """By zoo, the median of what a proof costs in steps, and the mean of each kind."""
    lines = []
    for zoo in sorted({row["zoo"] for row in rows}):
        own = [row for row in rows if row["zoo"] == zoo]
        kinds = sorted({kind for row in own for kind in row["by_kind"]})
        means = {k: statistics.fmean(row["by_kind"].get(k, 0.0) for row in own) for k in kinds}
        told = ", ".join(f"{kind} {mean:.0f}" for kind, mean in means.items())
        median = statistics.median(row["cost"] for row in own)
        lines.append(f"{zoo}: {len(own)} proofs, median {median:.0f} steps (means: {told})")
    return lines


Rows = Sequence[dict[str, Any]]


def paired(old: Rows, new: Rows) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """The rows of the proofs that both have."""
    after = {(row["zoo"], row["task"], row["policy"]): row for row in new}
    both = [(row, after.get((row["zoo"], row["task"], row["policy"]))) for row in old]
    return [(before, now) for before, now in both if now is not None]


def compare(old: Rows, new: Rows) -> list[str]:
    """The costs before and after of the proofs that both have, and what is judged otherwise."""
    pairs = paired(old, new)
    lines = ["before:", *median_costs([before for before, _ in pairs])]
    lines += ["after:", *median_costs([now for _, now in pairs])]
    differing = [pair for pair in pairs if pair[0]["verdict"] != pair[1]["verdict"]]
    for before, now in differing:
        lines.append(" ".join(now[name] for name in ("zoo", "task", "policy", "truth")))
        lines += [f"  {row['verdict']}: {row['reason']}" for row in (before, now)]
    return [*lines, f"{len(differing)} of {len(pairs)} verdicts differ"]


def main() -> int:
    """Read the arguments; print the costs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--zoo", nargs="+", default=[str(each) for each in FOLDERS])
    parser.add_argument("--gate", action="store_true", help="only the tasks of tests/zoo/gate.json")
    parser.add_argument("--only", nargs="*", default=[], help="names of tasks")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=BATCH, help="the batch of the recipes")
    parser.add_argument("--trained", type=int, help="a smaller batch for the trainings")
    parser.add_argument("--jobs", type=int, default=1, help="tasks at once")
    parser.add_argument("--output", type=Path, help="write the rows here, as JSON")
    parser.add_argument("--compare", nargs=2, type=Path, metavar="FILE", help="prove nothing")
    arguments = parser.parse_args()
    if arguments.compare:
        old, new = (json.loads(file.read_text())["rows"] for file in arguments.compare)
        print("\n".join(compare(old, new)))
        return 0
    gate = json.loads((ZOO / "gate.json").read_text())["tasks"]
    jobs = [
        job
        for folder in map(Path, arguments.zoo)
        for job in jobs_of(folder, arguments.only, (arguments.seed,), (), "cpu")
        if not arguments.gate or job.path.stem in gate.get(folder.name, ())
    ]
    prove = partial(costs, batch=arguments.batch, trained=arguments.trained)
    rows = [row for found in judged(jobs, arguments.jobs, judge=prove) for row in found["rows"]]
    print("\n".join(median_costs(rows)))
    if arguments.output:
        asked = {name: getattr(arguments, name) for name in ("seed", "batch", "trained")}
        found = {**machine(), **asked, "rows": rows}
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
