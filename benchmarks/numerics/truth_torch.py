"""What becomes of a torch task under each precision, from long runs over several seeds by hand.

Every run is a loop written by hand (`loops_torch`), of as many steps as the task says it takes
until it shows (TRUTH_STEPS; 200 where it says nothing) and eight seeds, at a loss scale that
torch's own scaler finds. Where those do not decide, sixteen do; the rules are those of `labels`.
Nothing here may come from the code that is judged.

A task that has a training_step is trained once more with the model's outputs left in 16 bits:
`under_plain_autocast`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autoprec.backends.protocol import Task
from autoprec.core.numerics.traces import Trajectory
from autoprec.core.recipe import LossScale, Recipe
from autoprec.workers.task_file import load_task
from benchmarks.numerics.labels import (
    BATCH,
    CANNOT_RUN,
    FLOOR,
    LOW_FLOOR,
    MORE_SEEDS,
    POLICIES,
    SEEDS,
    STEPS,
    Runs,
    ending,
    label,
    undecided,
    write,
)
from benchmarks.numerics.loops_torch import scale_by_hand, train


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
    seeds: tuple[int, int] = (SEEDS, MORE_SEEDS),
) -> dict[str, Any]:
    """Label policies of one task, over more seeds where a few do not decide."""
    own_steps = getattr(sys.modules[task.build_model.__module__], "TRUTH_STEPS", None)
    steps, floor = (STEPS, FLOOR) if own_steps is None else (own_steps, LOW_FLOOR)
    rows: dict[str, Any] = {"steps": steps}
    few, many = seeds

    def runs(name: str, recipe: Recipe, *, noisy: bool = False, plain: bool = False) -> Runs:
        made = by_hand(task, name, recipe, steps, device, noisy=noisy, plain=plain)
        return Runs(made, recipe)

    float32, noisy = (runs("float32", Recipe(batch_size=BATCH), noisy=n) for n in (False, True))
    for name in policies:
        try:
            recipe = scaled(task, POLICIES[name], device)
        except CANNOT_RUN as error:
            rows[name] = {"label": "broken", "why": f"raises: {str(error)[:80]}", "scale": None}
            continue
        ours = runs(name, recipe)
        rows[name] = label(float32, noisy, ours, few, floor)
        if undecided(rows[name]):
            rows[name] = label(float32, noisy, ours, many, floor) | {"seeds": many}
            if undecided(rows[name]):
                rows[name]["label"] = "unclear"
        if task.training_step is not None:
            left = label(float32, noisy, runs(name, recipe, plain=True), few, floor)
            rows[name]["under_plain_autocast"] = left["label"]
    rows["float32"] = [ending(r) for r in float32.first(few)]
    rows["noisy"] = [ending(r) for r in noisy.first(few)]
    return rows


def scaled(task: Task, recipe: Recipe, device: str) -> Recipe:
    """The recipe at the scale that is found by hand, where it needs one."""
    if recipe.loss_scale is None:
        return recipe
    return replace(recipe, loss_scale=LossScale(initial=scale_by_hand(task, BATCH, device)))


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
