"""Trains every task of the zoo for long, over seeds, and writes what really breaks to truth.json.

    python tests/zoo_keras/measure_truth.py [TASK ...]

Broken is what does not stay finite, or whose mean loss of the last fifth is clearly worse than
float32's: by more than a tenth, and by more than three times what noise on the first weights does.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from autoprec.backends.base import Task
from autoprec.backends.keras.backend import KerasBackend
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import LossScale, Recipe

HERE = Path(__file__).parent
TRUTH = HERE / "truth.json"
NAMES = tuple(sorted(path.stem for path in HERE.glob("*.py") if "\nTRUTH = {" in path.read_text()))
BATCH, STEPS, SEEDS = 16, 200, (0, 1, 2)


def task(name: str) -> Task:
    module = importlib.import_module(name)
    return Task(name, module.build_model, module.build_data)


def expected(name: str) -> dict[str, str]:
    """What the task's author says, written before anything was measured."""
    return dict(importlib.import_module(name).TRUTH)


def tracer(name: str) -> Any:
    return KerasBackend().tracer(task(name), device="cpu", seed=0, report=lambda *_: None)


def tuned(policy: Policy, traced: Any) -> Recipe:
    """The recipe with a loss scale four octaves below the largest safe one, where one is needed."""
    if not policy.needs_loss_scale:
        return Recipe(policy=policy, batch_size=BATCH)
    plain = Recipe(policy=policy, batch_size=BATCH, loss_scale=LossScale())
    largest = traced.backward_exponents(recipe=plain, batches=8).largest
    exponent = max(-24, min(126, 15 - (largest or 0) - 4))
    scale = LossScale(initial=2.0**exponent, floor=2.0**-24)
    return Recipe(policy=policy, batch_size=BATCH, loss_scale=scale)


def end(run: Any) -> float:
    last = run.losses[-len(run.losses) // 5 :]
    return sum(loss if loss is not None else float("inf") for loss in last) / len(last)


def measure(name: str, steps: int = STEPS, seeds: tuple[int, ...] = SEEDS) -> dict[str, Any]:
    traced = tracer(name)
    recipes = {"float32": Recipe(batch_size=BATCH)}
    for policy in (Policy.MIXED_BFLOAT16, Policy.MIXED_FLOAT16):
        recipes[policy.value] = tuned(policy, traced)
    ends: dict[str, list[float]] = {}
    for seed in seeds:
        for key, recipe in recipes.items():
            run = traced.trajectory(recipe=recipe, seed=seed, steps=steps)
            frozen = len(run.skipped) > steps // 2
            ends.setdefault(key, []).append(float("inf") if frozen else end(run))
        noisy = traced.trajectory(recipe=recipes["float32"], seed=seed, steps=steps, noisy=True)
        ends.setdefault("noisy", []).append(end(noisy))
    means = {key: sum(values) / len(values) for key, values in ends.items()}
    allowed = max(0.1 * means["float32"], 3 * abs(means["noisy"] - means["float32"]))
    found = {"float32": means["float32"], "noisy": means["noisy"]}
    for key in ("mixed_bfloat16", "mixed_float16"):
        broken = not means[key] - means["float32"] <= allowed
        loss = means[key] if means[key] != float("inf") else None
        found[key] = {"loss": loss, "truth": "broken" if broken else "healthy"}
    return found


def main() -> None:
    truth = json.loads(TRUTH.read_text()) if TRUTH.exists() else {}
    for name in sys.argv[1:] or NAMES:
        truth[name] = measure(name)
        print(name, json.dumps(truth[name]), flush=True)
        TRUTH.write_text(json.dumps(truth, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
