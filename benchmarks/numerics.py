"""Prints how well numerics are judged on the zoo: who is caught, which scale, which islands.

    python benchmarks/numerics.py                  the three tables, on tests/zoo and its truth
    python benchmarks/numerics.py --truth          train every task long and write truth.json
    python benchmarks/numerics.py --zoo FOLDER     another folder of task files (and truth.json)

Truth comes from long runs over several seeds, under the recipe a user would get: float32, bfloat16,
float16 at the tuned loss scale, and float16 at 2**16. A pair of task and policy is broken where a
loss is not finite, a tenth of the steps is skipped, or the final loss is clearly not float32's; it
is unclear, and not counted, where the runs do not decide.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import logging
import math
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autoprec.backends.base import Task
from autoprec.backends.torch.backend import TorchBackend
from autoprec.backends.torch.trace import TorchTracer
from autoprec.core.dtypes import Policy
from autoprec.core.judge import Verdict
from autoprec.core.recipe import LossScale, Recipe
from autoprec.core.trace import Trajectory
from autoprec.tuning.proof import Proof
from autoprec.tuning.taskfile import load_task

ZOO = Path(__file__).parent.parent / "tests" / "zoo"
BATCH = 32
TRUTH_STEPS = 200
TRUTH_SEEDS, MORE_SEEDS = 5, 20
POLICIES = {
    "bfloat16": Recipe(Policy.MIXED_BFLOAT16, BATCH),
    "float16": Recipe(Policy.MIXED_FLOAT16, BATCH, loss_scale=LossScale()),
    "float16_2^16": Recipe(Policy.MIXED_FLOAT16, BATCH, loss_scale=LossScale(initial=2.0**16)),
}


def silent(phase: str, step: int) -> None:
    """Report to nobody."""


def tasks(folder: Path, only: list[str]) -> Iterator[tuple[str, Task]]:
    """The task files of a folder: every module that defines build_model."""
    for path in sorted(folder.glob("*.py")):
        if "def build_model" in path.read_text() and (not only or path.stem in only):
            yield path.stem, loaded(path)


@functools.cache
def loaded(path: Path) -> Task:
    """The task of a file, which can be loaded once only."""
    return load_task(path)


def tracer(task: Task) -> TorchTracer:
    """A tracer on the CPU."""
    return TorchTracer(task, device="cpu", seed=0, report=silent)


# Truth ------------------------------------------------------------------------------------------


def write_truth(folder: Path, only: list[str]) -> None:
    """Train every task under every policy and write what became of it."""
    target = folder / "truth.json"
    known = json.loads(target.read_text()) if target.exists() else {"tasks": {}}
    known |= {"steps": TRUTH_STEPS, "seeds": TRUTH_SEEDS, "batch_size": BATCH}
    known |= {"more_seeds": MORE_SEEDS}
    known |= {"software": f"torch {torch.__version__} on a CPU"}
    for name, task in tasks(folder, only):
        started = time.monotonic()
        known["tasks"][name] = truth_of(task)
        target.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
        labels = {p: known["tasks"][name][p]["label"] for p in POLICIES}
        print(f"{name:20} {labels} {time.monotonic() - started:.0f} s", flush=True)


def truth_of(task: Task) -> dict[str, Any]:
    """Label every policy of one task, over more seeds where a few do not decide."""
    trace = tracer(task)
    plain = Recipe(batch_size=BATCH)
    float32, noisy = Runs(trace, plain), Runs(trace, plain, noisy=True)
    rows: dict[str, Any] = {}
    for name, recipe in POLICIES.items():
        tuned = at_tuned_scale(Proof(trace), recipe) if name == "float16" else recipe
        ours = Runs(trace, tuned)
        rows[name] = label(float32, noisy, ours, TRUTH_SEEDS)
        if undecided(rows[name]):
            rows[name] = label(float32, noisy, ours, MORE_SEEDS) | {"seeds": MORE_SEEDS}
            if undecided(rows[name]):
                rows[name]["label"] = "unclear"
    rows["float32"] = [ending(r) for r in float32.first(TRUTH_SEEDS)]
    rows["noisy"] = [ending(r) for r in noisy.first(TRUTH_SEEDS)]
    return rows


class Runs:
    """The long runs of one recipe, a seed each, made when they are asked for."""

    def __init__(self, trace: TorchTracer, recipe: Recipe, *, noisy: bool = False) -> None:
        self._trace, self.recipe, self._noisy = trace, recipe, noisy
        self._made: list[Trajectory] = []

    def first(self, seeds: int) -> list[Trajectory]:
        """The runs of the seeds from 0."""
        while len(self._made) < seeds:
            self._made.append(run(self._trace, self.recipe, len(self._made), self._noisy))
        return self._made[:seeds]


def run(trace: TorchTracer, recipe: Recipe, seed: int, noisy: bool = False) -> Trajectory:
    """One long run."""
    return trace.trajectory(recipe=recipe, seed=seed, steps=TRUTH_STEPS, noisy=noisy)


def ending(trajectory: Trajectory) -> float | None:
    """The mean loss of the last tenth; None where a loss was not finite."""
    losses = [loss for loss in trajectory.losses if loss is not None]
    if len(losses) < len(trajectory.losses):
        return None
    return statistics.fmean(losses[-TRUTH_STEPS // 10 :])


def label(float32: Runs, noisy: Runs, ours: Runs, seeds: int) -> dict[str, Any]:
    """Train over so many seeds and say whether our recipe is broken, healthy or unclear."""
    scale = ours.recipe.loss_scale.initial if ours.recipe.loss_scale else None
    try:
        runs = ours.first(seeds)
    except RuntimeError as error:
        return {"label": "broken", "why": f"raises: {str(error)[:80]}", "scale": scale}
    ends = [ending(r) for r in runs]
    skipped = sum(len(r.skipped) for r in runs)
    row = {"ends": ends, "skipped": skipped, "scale": scale}
    if any(end is None for end in ends):
        return row | {"label": "broken", "why": "not finite"}
    if skipped > 0.1 * TRUTH_STEPS * seeds:
        return row | {"label": "broken", "why": "skipped steps"}
    reference = float32.first(seeds)
    return row | compare(*(paired(rows, reference) for rows in (runs, noisy.first(seeds))))


def paired(runs: list[Trajectory], float32: list[Trajectory]) -> list[float]:
    """Each seed's final loss against float32's, as a relative difference."""
    scale = 1e-3 * abs(statistics.fmean(r.losses[0] or 1.0 for r in float32))
    mean = max(abs(statistics.fmean(ending(r) or 0.0 for r in float32)), scale)
    return [
        ((ending(r) or 0.0) - (ending(f) or 0.0)) / mean for r, f in zip(runs, float32, strict=True)
    ]


def compare(ours: list[float], null: list[float]) -> dict[str, Any]:
    """Broken: 10 % away, by three standard errors and beyond what noise does; healthy: not near.

    What noise does is the spread of noisy float32 about its own mean: noise that makes the loss
    worse on every seed is no excuse, but what a broken precision does.
    """
    mean = statistics.fmean(ours)
    spread = statistics.stdev(ours) / math.sqrt(len(ours))
    noise = statistics.stdev(null)
    row = {"difference": mean, "error": spread, "noise": noise}
    if abs(mean) > _limits(row)[1]:
        return row | {"label": "broken", "why": f"final loss {100 * mean:+.0f} %"}
    if abs(mean) > _limits(row)[0]:
        return row | {"label": "unclear", "why": f"final loss {100 * mean:+.0f} %"}
    return row | {"label": "healthy", "why": f"final loss {100 * mean:+.1f} %"}


def undecided(row: dict[str, Any]) -> bool:
    """Whether the mean is within its standard error of a limit, so that luck chose the label."""
    if "difference" not in row:
        return False
    return any(abs(abs(row["difference"]) - limit) < row["error"] for limit in _limits(row))


def _limits(row: dict[str, float]) -> tuple[float, float]:
    """How far a healthy final loss may be from float32's, and from where it is broken."""
    noise = 2 * row["noise"]
    return max(0.05, noise), max(0.1, 3 * row["error"], noise)


# The tables --------------------------------------------------------------------------------------


def confusion(folder: Path, only: list[str], truth: dict[str, Any], seeds: list[int]) -> Any:
    """Prove every task under both 16-bit policies, and count who is caught and who is flagged."""
    counts = {(p, t): [0, 0] for p in ("bfloat16", "float16") for t in ("broken", "healthy")}
    wrong: list[str] = []
    costs: list[float] = []
    for name, task in tasks(folder, only):
        steps200 = float32_seconds(task, 200)
        for policy in ("bfloat16", "float16"):
            expected = truth[name][policy]["label"]
            for seed in seeds if expected != "unclear" else ():
                verdict = verdict_of(task, POLICIES[policy], seed)
                flagged = verdict.verdict != "equal"
                counts[policy, expected][0] += flagged
                counts[policy, expected][1] += 1
                costs.append(verdict.seconds / steps200)
                if flagged != (expected == "broken"):
                    row = f"{name} {policy} seed {seed}: {verdict.verdict}, truth {expected}"
                    wrong.append(f"{row} ({truth[name][policy]['why']}): {verdict.reason}")
                    print(f"  {wrong[-1]}", flush=True)
    print(f"\nVerdicts over {len(seeds)} seeds (flagged: drift or rejected)\n")
    print("| policy | broken caught | healthy flagged |\n|---|---|---|")
    rows = {}
    for policy in ("bfloat16", "float16"):
        caught, flagged = counts[policy, "broken"], counts[policy, "healthy"]
        print(f"| {policy} | {share(caught)} | {share(flagged)} |")
        rows[policy] = {"broken_caught": caught, "healthy_flagged": flagged}
    total = [[sum(c[i] for (_, t), c in counts.items() if t == k) for i in (0, 1)] for k in TRUTHS]
    print(f"| both | {share(total[0])} | {share(total[1])} |")
    rows["both"] = {"broken_caught": total[0], "healthy_flagged": total[1]}
    cost = {"median": statistics.median(costs), "largest": max(costs)}
    print(f"\nA proof takes {cost['median']:.2f} (at most {cost['largest']:.2f}) times 200 steps")
    return {"table": rows, "wrong": wrong, "proof_over_200_float32_steps": cost}


TRUTHS = ("broken", "healthy")


def float32_seconds(task: Task, steps: int) -> float:
    """How long `steps` float32 steps of the user's own loop take."""
    return tracer(task).trajectory(recipe=Recipe(batch_size=BATCH), seed=0, steps=steps).seconds


def share(pair: list[int]) -> str:
    """Show a count and its share."""
    return f"{pair[0]} of {pair[1]} ({100 * pair[0] / max(1, pair[1]):.1f} %)"


def verdict_of(task: Task, recipe: Recipe, seed: int) -> Verdict:
    """What the tuner would decide: the scale tuned first, then the proof."""
    proof = Proof(TorchTracer(task, device="cpu", seed=seed, report=silent))
    return proof.prove(at_tuned_scale(proof, recipe))


def at_tuned_scale(proof: Proof, recipe: Recipe) -> Recipe:
    """The recipe at the scale the proof chooses, where it needs one and runs."""
    if recipe.loss_scale is None:
        return recipe
    try:
        return replace(recipe, loss_scale=proof.tune_loss_scale(recipe)[0])
    except RuntimeError:
        return recipe


def loss_scales(folder: Path, only: list[str], truth: dict[str, Any]) -> Any:
    """Skipped steps in 100 at the frameworks' scales and at the tuned one, on healthy tasks."""
    rows = {}
    skips = {"2^15": 0, "2^16": 0, "tuned": 0}
    for name, task in tasks(folder, only):
        if truth[name]["float16"]["label"] != "healthy":
            continue
        trace = tracer(task)
        recipe = POLICIES["float16"]
        mended = at_tuned_scale(Proof(trace), recipe)
        scales = {"2^15": LossScale(initial=2.0**15), "2^16": LossScale(initial=2.0**16)}
        scales["tuned"] = mended.loss_scale or LossScale()
        row: dict[str, Any] = {"exponent": math.log2(scales["tuned"].initial)}
        for key, scale in scales.items():
            ran = trace.trajectory(recipe=replace(recipe, loss_scale=scale), seed=1, steps=100)
            row[key] = len(ran.skipped)
            skips[key] += len(ran.skipped)
        rows[name] = row
    print("\nSkipped steps in 100, summed over the tasks float16 can train\n")
    print("| tasks | at 2^15 | at 2^16 | tuned |\n|---|---|---|---|")
    print(f"| {len(rows)} | {skips['2^15']} | {skips['2^16']} | {skips['tuned']} |")
    for name, row in rows.items():
        if row["2^15"] or row["2^16"] or row["tuned"]:
            print(f"  {name}: {row}")
    return {"skipped": skips, "tasks": rows}


def islands(folder: Path, only: list[str], truth: dict[str, Any]) -> Any:
    """Mend every broken pair: trials, minimality, matrix-product work left in float32."""
    rows = {}
    for name, task in tasks(folder, only):
        for policy in ("bfloat16", "float16"):
            if truth[name][policy]["label"] == "broken":
                rows[f"{name} {policy}"] = mend(task, POLICIES[policy])
                print(f"  {name} {policy}: {rows[f'{name} {policy}']}", flush=True)
    mended = [row for row in rows.values() if row["mended"]]
    mendable = [row for row in rows.values() if row["mendable"]]
    print("\nIslands for the broken pairs\n")
    print("| broken | mendable | mended | minimal | trials median/max | work left in float32 |")
    print("|---|---|---|---|---|---|")
    trials = [row["trials"] for row in mended] or [0]
    work = statistics.fmean([row["products"] for row in mended] or [0.0])
    print(
        f"| {len(rows)} | {len(mendable)} | {len(mended)} | {sum(r['minimal'] for r in mended)} "
        f"| {statistics.median(trials):g}/{max(trials)} | {100 * work:.1f} % |"
    )
    return rows


def mend(task: Task, recipe: Recipe) -> dict[str, Any]:
    """Search islands for one pair; minimal if without any one of them it fails again."""
    units = TorchBackend().describe(task, device="cpu", seed=0, batch_size=BATCH, report=silent)
    proof = Proof(tracer(task))
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


def main() -> int:
    """Read the arguments; print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--zoo", type=Path, default=ZOO)
    parser.add_argument("--truth", action="store_true", help="train long and write truth.json")
    parser.add_argument("--only", nargs="*", default=[], help="names of tasks")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tables", nargs="*", default=["confusion", "scales", "islands"])
    parser.add_argument("--output", type=Path, help="write the numbers here, as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)  # a line for every loss that is not finite
    folder, only = arguments.zoo, arguments.only
    if arguments.truth:
        write_truth(folder, only)
        return 0
    truth = json.loads((folder / "truth.json").read_text())["tasks"]
    seeds = [1000 * (index + 1) for index in range(arguments.seeds)]
    makers: dict[str, Callable[[], Any]] = {
        "confusion": lambda: confusion(folder, only, truth, seeds),
        "scales": lambda: loss_scales(folder, only, truth),
        "islands": lambda: islands(folder, only, truth),
    }
    results: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} processors, one thread used",
        "software": {"python": platform.python_version(), "torch": torch.__version__},
    }
    for name in arguments.tables:
        results[name] = makers[name]()
    if arguments.output:
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
