"""Labels what long runs show: broken, healthy or unclear; the same rules for every framework.

A pair of task and policy is broken where a loss is not finite, a tenth of the steps is skipped, or
the final loss is clearly not float32's.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from autoprec.core.dtypes import Policy
from autoprec.core.numerics.traces import Trajectory
from autoprec.core.recipe import LossScale, Recipe

BATCH = 32
STEPS = 200
SEEDS, MORE_SEEDS = 8, 16
CANNOT_RUN = (RuntimeError, TypeError, ValueError)
"""What frameworks raise where a kernel is not there in 16 bits, or dtypes do not mix."""

FLOOR, LOW_FLOOR = 1e-3, 1e-4
"""Final losses below this share of the first one count as this much of it: the lower one where a
task says how long it trains, and in every task of Keras."""
POLICIES = {
    "bfloat16": Recipe(Policy.MIXED_BFLOAT16, BATCH),
    "float16": Recipe(Policy.MIXED_FLOAT16, BATCH, loss_scale=LossScale()),
}


def names(folder: Path, only: list[str]) -> list[str]:
    """The task files of a folder: every module that defines build_model."""
    found = [p.stem for p in sorted(folder.glob("*.py")) if "\ndef build_model(" in p.read_text()]
    return [name for name in found if not only or name in only]


def write(
    folder: Path,
    only: list[str],
    about: Mapping[str, Any],
    make: Callable[[Path], Mapping[str, Any]],
) -> None:
    """Write what `make` finds of every task to the folder's truth.json, task by task."""
    target = folder / "truth.json"
    for task in names(folder, only):
        started = time.monotonic()
        rows = make(folder / f"{task}.py")
        known = json.loads(target.read_text()) if target.exists() else {"tasks": {}}
        known |= about
        known["tasks"][task] = rows
        target.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
        labels = {name: rows[name]["label"] for name in POLICIES}
        print(f"{task:22} {labels} {time.monotonic() - started:.0f} s", flush=True)


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
    except CANNOT_RUN as error:
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
