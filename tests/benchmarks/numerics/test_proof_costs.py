"""The steps of a proof are counted by what they are for, and two runs' verdicts are compared."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.numerics.proof_costs import FORWARD, compare, counted
from tests.backends.shared.one_weight import FLOAT16, FLOAT32, tracer


def test_every_step_is_counted_once_by_what_it_is_for() -> None:
    traced, counts = counted(tracer()[0])
    traced.reference(batch_size=8, steps=4, checkpoints=(0, 3), accumulation_steps=2)
    traced.compare_steps(recipe=FLOAT16)
    traced.noise(draws=3)
    traced.trajectory(recipe=FLOAT16, seed=0, steps=5)
    traced.trajectory(recipe=FLOAT32, seed=0, steps=6, noisy=True)
    traced.backward_exponents(recipe=FLOAT16, batches=7)
    assert counts == {
        "float32 training": 8,
        "float32 single steps": 2,  # of another batch: how noisy gradients are
        "float32 evaluation": FORWARD,
        "candidate evaluation": FORWARD,
        "noisy float32 evaluation": pytest.approx(3 * FORWARD),
        "candidate single steps": 2,
        "noisy float32 single steps": 6,
        "candidate training": 5,
        "noisy float32 training": 6,
        "loss scale": 7,
    }


def row(task: str, verdict: str, cost: float) -> dict[str, Any]:
    about = {"zoo": "zoo", "task": task, "policy": "bfloat16", "truth": "healthy"}
    return {
        **about,
        "verdict": verdict,
        "reason": "why",
        "cost": cost,
        "by_kind": {"training": cost},
    }


def test_verdicts_of_what_both_runs_proved_are_compared() -> None:
    old = [row("one", "equal", 184), row("two", "equal", 200), row("gone", "equal", 1)]
    new = [row("one", "equal", 134), row("two", "drift", 150), row("new", "equal", 1)]
    assert compare(old, new) == [
        "before:",
        "zoo: 2 proofs, median 192 steps (means: training 192)",
        "after:",
        "zoo: 2 proofs, median 142 steps (means: training 142)",
        "zoo two bfloat16 healthy",
        "  equal: why",
        "  drift: why",
        "1 of 2 verdicts differ",
    ]
