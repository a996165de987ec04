"""What becomes of a task under each precision, from long runs over several seeds.

A pair of task and policy is broken where a loss is not finite, a tenth of the steps is skipped, or
the final loss is clearly not float32's. Where five seeds do not decide, twenty do; it is unclear,
and not counted, where those do not decide either.

A task that says how many steps it takes until it shows (TRUTH_STEPS) is trained by loops written by
hand, of eight seeds, at the loss scale that would be tuned. Where it has a training_step, it is
trained once more with the model's outputs left in 16 bits: `under_plain_autocast`.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from zoo_loops import DTYPES, train

from autoprec.backends.base import Task
from autoprec.backends.torch.trace import TorchTracer
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import LossScale, Recipe
from autoprec.core.trace import Trajectory
from autoprec.tuning.proof import Proof
from autoprec.tuning.taskfile import load_task

BATCH = 32
STEPS = 200
SEEDS, MORE_SEEDS = 5, 20
HAND_SEEDS, MORE_HAND_SEEDS = 8, 16
FLOOR, HAND_FLOOR = 1e-3, 1e-4
"""Final losses below this share of the first one count as this much."""
POLICIES = {
    "bfloat16": Recipe(Policy.MIXED_BFLOAT16, BATCH),
    "float16": Recipe(Policy.MIXED_FLOAT16, BATCH, loss_scale=LossScale()),
    "float16_2^16": Recipe(Policy.MIXED_FLOAT16, BATCH, loss_scale=LossScale(initial=2.0**16)),
}


def silent(phase: str, step: int) -> None:
    """Report to nobody."""


def names(folder: Path, only: list[str]) -> list[str]:
    """The task files of a folder: every module that defines build_model."""
    found = [p.stem for p in sorted(folder.glob("*.py")) if "def build_model" in p.read_text()]
    return [name for name in found if not only or name in only]


def tasks(folder: Path, only: list[str]) -> Iterator[tuple[str, Task]]:
    """The tasks of a folder."""
    for name in names(folder, only):
        yield name, load_task(folder / f"{name}.py")


def tracer(task: Task, seed: int = 0, device: str = "cpu") -> TorchTracer:
    """A tracer on the device."""
    return TorchTracer(task, device=device, seed=seed, report=silent)


def at_tuned_scale(proof: Proof, recipe: Recipe) -> Recipe:
    """The recipe at the scale the proof chooses, where it needs one and runs."""
    if recipe.loss_scale is None:
        return recipe
    try:
        return replace(recipe, loss_scale=proof.tune_loss_scale(recipe)[0])
    except RuntimeError:
        return recipe


def write_truth(folder: Path, only: list[str]) -> None:
    """Train every task under every policy and write what became of it."""
    target = folder / "truth.json"
    known = json.loads(target.read_text()) if target.exists() else {"tasks": {}}
    known |= {"steps": STEPS, "seeds": SEEDS, "more_seeds": MORE_SEEDS, "batch_size": BATCH}
    known |= {"software": f"torch {torch.__version__} on a CPU"}
    for name, task in tasks(folder, only):
        started = time.monotonic()
        known["tasks"][name] = truth_of(task)
        target.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
        labels = {p: row["label"] for p, row in known["tasks"][name].items() if p in POLICIES}
        print(f"{name:20} {labels} {time.monotonic() - started:.0f} s", flush=True)


def truth_of(task: Task) -> dict[str, Any]:
    """Label every policy of one task, over more seeds where a few do not decide."""
    steps = getattr(sys.modules[task.build_model.__module__], "TRUTH_STEPS", None)
    rows: dict[str, Any] = {} if steps is None else {"steps": steps}
    few, many = (SEEDS, MORE_SEEDS) if steps is None else (HAND_SEEDS, MORE_HAND_SEEDS)
    floor = FLOOR if steps is None else HAND_FLOOR
    trace = tracer(task)

    def runs(name: str, recipe: Recipe, *, noisy: bool = False, plain: bool = False) -> Runs:
        if steps is None:
            return Runs(traced(trace, recipe, noisy=noisy), recipe)
        return Runs(by_hand(task, name, recipe, steps, noisy=noisy, plain=plain), recipe)

    plain = Recipe(batch_size=BATCH)
    float32, noisy = runs("float32", plain), runs("float32", plain, noisy=True)
    for name, recipe in POLICIES.items():
        if steps is not None and name not in DTYPES:
            continue
        tuned = at_tuned_scale(Proof(trace), recipe) if name == "float16" else recipe
        ours = runs(name, tuned)
        rows[name] = label(float32, noisy, ours, few, floor)
        if undecided(rows[name]):
            rows[name] = label(float32, noisy, ours, many, floor) | {"seeds": many}
            if undecided(rows[name]):
                rows[name]["label"] = "unclear"
        if steps is not None and task.training_step is not None:
            left = label(float32, noisy, runs(name, tuned, plain=True), few, floor)
            rows[name]["under_plain_autocast"] = left["label"]
    rows["float32"] = [ending(r) for r in float32.first(few)]
    rows["noisy"] = [ending(r) for r in noisy.first(few)]
    return rows


def traced(trace: TorchTracer, recipe: Recipe, *, noisy: bool) -> Callable[[int], Trajectory]:
    """Long runs by the tracer, as a function of the seed."""
    return lambda seed: trace.trajectory(recipe=recipe, seed=seed, steps=STEPS, noisy=noisy)


def by_hand(
    task: Task, policy: str, recipe: Recipe, steps: int, *, noisy: bool, plain: bool
) -> Callable[[int], Trajectory]:
    """Long runs by a loop written by hand, as a function of the seed."""
    scale = recipe.loss_scale.initial if recipe.loss_scale else 1.0

    def run(seed: int) -> Trajectory:
        return train(
            task,
            policy,
            seed=seed,
            steps=steps,
            batch=BATCH,
            scale=scale,
            noisy=noisy,
            plain=plain,
        )

    return run


class Runs:
    """The long runs of one recipe, a seed each, made when they are asked for."""

    def __init__(self, make: Callable[[int], Trajectory], recipe: Recipe) -> None:
        self._make, self.recipe = make, recipe
        self._made: list[Trajectory] = []

    def first(self, seeds: int) -> list[Trajectory]:
        """The runs of the seeds from 0."""
        self._made += [self._make(seed) for seed in range(len(self._made), seeds)]
        return self._made[:seeds]


def ending(trajectory: Trajectory) -> float | None:
    """The mean loss of the last tenth; None where a loss was not finite."""
    losses = [loss for loss in trajectory.losses if loss is not None]
    if len(losses) < len(trajectory.losses):
        return None
    return statistics.fmean(losses[-len(losses) // 10 :])


def label(
    float32: Runs, noisy: Runs, ours: Runs, seeds: int, floor: float = FLOOR
) -> dict[str, Any]:
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
    if skipped > 0.1 * sum(len(r.losses) for r in runs):
        return row | {"label": "broken", "why": "skipped steps"}
    reference = float32.first(seeds)
    return row | compare(*(paired(rows, reference, floor) for rows in (runs, noisy.first(seeds))))


def paired(runs: list[Trajectory], float32: list[Trajectory], floor: float) -> list[float]:
    """Each seed's final loss against float32's, as a relative difference."""
    scale = floor * abs(statistics.fmean(r.losses[0] or 1.0 for r in float32))
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
