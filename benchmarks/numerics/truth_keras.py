"""What becomes of a Keras task under each precision, from long runs over several seeds by hand.

Every run is a loop written by hand (`loops_keras`), of as many steps as the task says it takes
until it shows (TRUTH_STEPS; 200 where it says nothing) and eight seeds, at a loss scale that
Keras's own scaler finds. Where those do not decide, sixteen do; the rules are those of `labels`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from autoprec.backends.protocol import Task
from autoprec.core.numerics.traces import Trajectory
from autoprec.core.recipe import LossScale, Recipe
from autoprec.workers.task_file import load_task
from benchmarks.numerics.labels import (
    BATCH,
    CANNOT_RUN,
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
from benchmarks.numerics.loops_keras import Loop, scale_by_hand


def write_truth(folder: Path, only: list[str]) -> None:
    """Train every task under every policy and write what became of it."""
    about = {"steps": STEPS, "seeds": SEEDS, "more_seeds": MORE_SEEDS}
    software = f"keras {keras.__version__}, tensorflow {tf.__version__} on a CPU"
    about |= {"batch_size": BATCH, "software": software}
    write(folder, only, about, lambda path: truth_of(load_task(path)))


def truth_of(
    task: Task,
    *,
    steps: int | None = None,
    seeds: tuple[int, int] = (SEEDS, MORE_SEEDS),
) -> dict[str, Any]:
    """Label both policies of one task, over more seeds where a few do not decide."""
    steps = steps or getattr(sys.modules[task.build_model.__module__], "TRUTH_STEPS", STEPS)
    few, many = seeds
    rows: dict[str, Any] = {"steps": steps}

    plain = Recipe(batch_size=BATCH)
    loop = Loop(task, "float32")
    float32, noisy = (Runs(by_hand(loop, plain, steps, noisy=n), plain) for n in (False, True))
    for policy in POLICIES:
        try:
            loop = Loop(task, policy)
            recipe = scaled(loop, POLICIES[policy])
        except CANNOT_RUN as error:
            rows[policy] = {"label": "broken", "why": f"raises: {str(error)[:80]}", "scale": None}
            continue
        ours = Runs(by_hand(loop, recipe, steps), recipe)
        rows[policy] = label(float32, noisy, ours, few, LOW_FLOOR)
        if undecided(rows[policy]):
            rows[policy] = label(float32, noisy, ours, many, LOW_FLOOR) | {"seeds": many}
            if undecided(rows[policy]):
                rows[policy]["label"] = "unclear"
    rows["float32"] = [ending(run) for run in float32.first(few)]
    rows["noisy"] = [ending(run) for run in noisy.first(few)]
    return rows


def scaled(loop: Loop, recipe: Recipe) -> Recipe:
    """The recipe at the scale that is found by hand, where it needs one."""
    if recipe.loss_scale is None:
        return recipe
    return replace(recipe, loss_scale=LossScale(initial=scale_by_hand(loop, BATCH)))


def by_hand(
    loop: Loop, recipe: Recipe, steps: int, *, noisy: bool = False
) -> Callable[[int], Trajectory]:
    """Long runs by a loop written by hand, as a function of the seed."""
    scale = recipe.loss_scale.initial if recipe.loss_scale else 1.0

    def run(seed: int) -> Trajectory:
        return loop.train(seed=seed, steps=steps, batch=BATCH, scale=scale, noisy=noisy)

    return run
