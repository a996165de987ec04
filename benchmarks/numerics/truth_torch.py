"""What becomes of a task under each precision, from long runs over several seeds.

A pair of task and policy is broken where a loss is not finite, a tenth of the steps is skipped, or
the final loss is clearly not float32's. Where five seeds do not decide, twenty do; it is unclear,
and not counted, where those do not decide either.

A task that says how many steps it takes until it shows (TRUTH_STEPS) is trained by loops written by
hand, of eight seeds, at the loss scale that would be tuned. Where it has a training_step, it is
trained once more with the model's outputs left in 16 bits: `under_plain_autocast`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from autoprec.backends.protocol import Task
from autoprec.backends.shared.tracer import ComparisonTracer
from autoprec.backends.torch.trace.tracer import torch_tracer
from autoprec.core.numerics.traces import Trajectory
from autoprec.core.recipe import Recipe
from autoprec.tuning.proof.recipe_proof import Proof
from autoprec.workers.task_file import load_task
from benchmarks.numerics.labels import (
    BATCH,
    FLOOR,
    HAND_FLOOR,
    HAND_SEEDS,
    MORE_HAND_SEEDS,
    POLICIES,
    STEPS,
    Runs,
    at_tuned_scale,
    ending,
    label,
    silent,
    undecided,
    write,
)
from benchmarks.numerics.loops_torch import DTYPES, train

SEEDS, MORE_SEEDS = 5, 20


def tracer(task: Task, seed: int = 0, device: str = "cpu") -> ComparisonTracer:
    """A tracer on the device."""
    return torch_tracer(task, device=device, seed=seed, report=silent)


def write_truth(folder: Path, only: list[str]) -> None:
    """Train every task under every policy and write what became of it."""
    about = {"steps": STEPS, "seeds": SEEDS, "more_seeds": MORE_SEEDS, "batch_size": BATCH}
    about |= {"software": f"torch {torch.__version__} on a CPU"}
    write(folder, only, about, lambda path: truth_of(load_task(path)))


def truth_of(
    task: Task,
    *,
    device: str = "cpu",
    policies: Sequence[str] = tuple(POLICIES),
    seeds: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Label policies of one task, over more seeds where a few do not decide."""
    steps = getattr(sys.modules[task.build_model.__module__], "TRUTH_STEPS", None)
    rows: dict[str, Any] = {} if steps is None else {"steps": steps}
    few, many = (SEEDS, MORE_SEEDS) if steps is None else (HAND_SEEDS, MORE_HAND_SEEDS)
    few, many = seeds or (few, many)
    floor = FLOOR if steps is None else HAND_FLOOR
    trace = tracer(task, device=device)
    hand = steps if steps is not None or device == "cpu" else STEPS

    def runs(name: str, recipe: Recipe, *, noisy: bool = False, plain: bool = False) -> Runs:
        if hand is None:
            return Runs(traced(trace, recipe, noisy=noisy), recipe)
        made = by_hand(task, name, recipe, hand, device, noisy=noisy, plain=plain)
        return Runs(made, recipe)

    plain = Recipe(batch_size=BATCH)
    float32, noisy = runs("float32", plain), runs("float32", plain, noisy=True)
    for name in policies:
        if hand is not None and name not in DTYPES:
            continue
        recipe = POLICIES[name]
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


def traced(trace: ComparisonTracer, recipe: Recipe, *, noisy: bool) -> Callable[[int], Trajectory]:
    """Long runs by the tracer, as a function of the seed."""
    return lambda seed: trace.trajectory(recipe=recipe, seed=seed, steps=STEPS, noisy=noisy)


def by_hand(
    task: Task, policy: str, recipe: Recipe, steps: int, device: str, *, noisy: bool, plain: bool
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
            device=device,
        )

    return run
