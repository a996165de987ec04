"""Prints what a constant in the loss does to the verdicts on the zoo: nothing, if all is well.

    python -m benchmarks.numerics.loss_constants [--output FILE]

Training does not see a constant in the loss: a log-likelihood may leave one out, an ELBO may add
another. So every proof is made three times: of the loss as it is, of one that is larger by ten
times its first value, and of one that crosses zero halfway. The runs are made once; the constant is
added to the losses that they report. The truth is that of the zoo, which trains without one; the
proofs have at most 120 steps.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from autoprec.backends.protocol import Tracer
from autoprec.core.numerics import proof_steps
from autoprec.core.numerics.traces import NoisyStep, StepComparison, Trajectory
from autoprec.core.recipe import Recipe
from autoprec.tuning.proof.recipe_proof import Proof
from autoprec.workers.task_file import load_task
from benchmarks.numerics.judge import at_tuned_scale
from benchmarks.numerics.labels import BATCH, POLICIES
from benchmarks.numerics.zoo import FOLDERS, Job, jobs_of, judged, on_one_thread
from benchmarks.numerics.zoo_tables import JUDGED, constants_table
from benchmarks.provenance import machine

#: By name, what is added to a loss that begins at `first` and ends at `last` in float32.
CONSTANTS: Mapping[str, Callable[[float, float], float]] = {
    "none": lambda first, last: 0.0,
    "ten first losses": lambda first, last: 10 * abs(first),
    "crosses zero": lambda first, last: -(first + last) / 2,
}

STEPS = 120


class Replayed:
    """A tracer that makes each run once; asked again, it answers from memory.

    Comparisons are at the checkpoints of the last float32 run that was asked for.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._known: dict[str, Any] = {}
        self._asked: dict[str, Any] = {}
        self._recorded = ""

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def answer(**arguments: Any) -> Any:
            arguments = {k: v for k, v in arguments.items() if k != "seconds"}
            if method == "reference":
                self._asked = arguments
            of = "" if method == "trajectory" else repr(self._asked)
            key = f"{method} {arguments} {of}"
            if key not in self._known:
                self._known[key] = self._make(method, arguments)
            return self._known[key]

        return answer

    def _make(self, method: str, arguments: Mapping[str, Any]) -> Any:
        asked = repr(self._asked)
        if method not in ("reference", "trajectory") and self._recorded != asked:
            self._tracer.reference(**self._asked)
        if method != "trajectory":
            self._recorded = asked
        return getattr(self._tracer, method)(**arguments)


class WithConstant:
    """A tracer whose task's loss has a constant more."""

    def __init__(self, tracer: Any, constant: float) -> None:
        self._tracer, self._constant = tracer, constant

    def __getattr__(self, method: str) -> Any:
        return getattr(self._tracer, method)

    def reference(
        self, *, steps: int, stop_at_plateau: bool = False, **arguments: Any
    ) -> Trajectory:
        run = self._more(self._tracer.reference(steps=steps, **arguments))
        if not stop_at_plateau:
            return run
        return replace(run, losses=run.losses[: proof_steps.stopping_step(run.losses, steps)])

    def trajectory(self, **arguments: Any) -> Trajectory:
        return self._more(self._tracer.trajectory(**arguments))

    def compare_steps(self, *, recipe: Recipe) -> tuple[StepComparison, ...]:
        points = self._tracer.compare_steps(recipe=recipe)
        return tuple(point.above(-self._constant) for point in points)

    def noise(self, *, draws: int) -> tuple[NoisyStep, ...]:
        return tuple(each.above(-self._constant) for each in self._tracer.noise(draws=draws))

    def _more(self, run: Trajectory) -> Trajectory:
        return run.above(-self._constant)


def verdicts(job: Job) -> dict[str, list[dict[str, Any]]]:
    """The verdicts on both 16-bit policies of one task, with each constant."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    on_one_thread(job.framework)
    task, rows = load_task(job.path), []
    runs = Replayed(job.tracer(task, job.seeds[0]))
    float32 = runs.trajectory(recipe=Recipe(batch_size=BATCH), seed=0, steps=60)
    first, last = float32.losses[0] or 0.0, float32.losses[-1] or 0.0
    for policy in JUDGED:
        label = job.truth[policy]["label"]
        if label == "unclear":
            continue
        recipe = None
        for name, constant in CONSTANTS.items():
            proof = Proof(WithConstant(runs, constant(first, last)), steps=STEPS)
            with contextlib.suppress(RuntimeError):
                recipe = recipe or at_tuned_scale(proof, POLICIES[policy])
            verdict = proof.prove(recipe or POLICIES[policy])
            told = {"verdict": verdict.verdict, "reason": verdict.reason, "steps": verdict.steps}
            about = {"zoo": job.zoo, "task": job.path.stem, "policy": policy, "truth": label}
            rows.append({**about, "constant": name, **told})
    return {"rows": rows}


def counts(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, list[int]]]:
    """By constant how many broken pairs were caught and healthy ones flagged, of how many."""
    found: dict[str, dict[str, list[int]]] = {}
    for name in CONSTANTS:
        own = [r for r in rows if r["constant"] == name]
        of = {truth: [r for r in own if r["truth"] == truth] for truth in ("broken", "healthy")}
        caught, flagged = (
            [sum(r["verdict"] != "equal" for r in each), len(each)] for each in of.values()
        )
        found[name] = {"broken_caught": caught, "healthy_flagged": flagged}
    return found


def changed(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The pairs that are accepted with one constant and not with another, with all verdicts."""
    pairs: dict[tuple[str, ...], dict[str, Any]] = {}
    for r in rows:
        about = {name: r[name] for name in ("zoo", "task", "policy", "truth")}
        pair = pairs.setdefault(tuple(about.values()), {**about, "verdicts": {}, "reasons": {}})
        pair["verdicts"][r["constant"]] = r["verdict"]
        pair["reasons"][r["constant"]] = r["reason"]
    accepted = {key: {v == "equal" for v in p["verdicts"].values()} for key, p in pairs.items()}
    return [pair for key, pair in pairs.items() if len(accepted[key]) > 1]


def main() -> int:
    """Read the arguments; print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--only", nargs="*", default=[], help="names of tasks")
    parser.add_argument("--jobs", type=int, default=2, help="tasks at once")
    parser.add_argument("--output", type=Path, help="write the numbers here, as JSON")
    arguments = parser.parse_args()
    seeds = (arguments.seed,)
    jobs = [job for f in FOLDERS for job in jobs_of(f, arguments.only, seeds, (), "cpu")]
    rows = [row for found in judged(jobs, arguments.jobs, judge=verdicts) for row in found["rows"]]
    found = {
        **machine(),
        "seed": arguments.seed,
        "counts": counts(rows),
        "changed": changed(rows),
    }
    print("\n".join(constants_table(found)))
    for pair in found["changed"]:
        print(f"{pair['zoo']} {pair['task']} {pair['policy']}, {pair['truth']}:")
        for name, reason in pair["reasons"].items():
            print(f"  {name}: {reason}")
    if arguments.output:
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
