"""Rows as the benchmarks write them, for the tests of their tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from factories import steady

from autoprec.core.codec import to_plain
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Recipe
from autoprec.core.speed.space import Space
from autoprec.core.speed.trial_results import Outcome, Status

BF16 = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=64)


def ratio(value: float, spread: float = 0.01) -> dict[str, float]:
    return {"ratio": value, "low": value - spread, "high": value + spread, "rounds": 12}


def outcome(point: Any, rate: float) -> Outcome:
    return Outcome(point, Status.OK, steady(1 / rate, 1))


SPACE = Space(
    policies=(Policy.FLOAT32, Policy.MIXED_BFLOAT16),
    batch_sizes=(8, 16),
    knobs={
        "keep_memory": (False, True),
        "fused_optimizer": (False, True),
        "implicit_bfloat16": (False, True),
    },
)


def row(task: str = "mlp", family: str = "amd-zen4", best: float = 1.0, **more: Any) -> Any:
    """An oracle's row as it is now."""
    return {
        "date": "2026-12-01",
        "commit": "abc1234",
        "family": family,
        "task": task,
        "points": 40,
        "trials": 10,
        "killed": 0,
        "grid_seconds": 200.0,
        "knobs_of_the_fastest": ["fused_optimizer"],
        "fastest": [],
        "stages": {
            "preflight": 2.0,
            "search": 10.0,
            "reranking": 4.0,
            "proof": 30.0,
            "confirmation": 4.0,
        },
        "recipes": {"chosen": to_plain(replace(BF16, knobs={"fused_optimizer": True}))},
        "chosen_over_best": ratio(best),
        "chosen_over_float32": ratio(3.0),
        "chosen_over_float32_alike": ratio(1.5),
        "best_over_float32": ratio(3.0),
        "second_over_chosen": ratio(1.0),
        "reason": "mixed_bfloat16 at batch 64 is 3.00x float32 as it was run (2.9-3.1, 6 rounds) "
        "and trains like float32",
        **more,
    }
