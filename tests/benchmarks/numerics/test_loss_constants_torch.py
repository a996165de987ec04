"""A constant in a real task's loss changes no verdict, and the benchmark's replays are honest."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from autoprec.core.recipe import Recipe
from benchmarks.numerics.loss_constants import CONSTANTS, Replayed, changed, counts, verdicts
from benchmarks.numerics.zoo import ZOO, jobs_of
from benchmarks.numerics.zoo_tables import constants_table

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]


@pytest.fixture
def alone() -> Iterator[None]:
    """Undo what a process of the benchmark's own may keep."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("task", "policy", "truth"),
    [
        ("rating_pairs", "bfloat16", "broken"),
        pytest.param("large_logits", "bfloat16", "healthy", marks=pytest.mark.slow),
    ],
)
def test_a_verdict_depends_on_no_constant(task: str, policy: str, truth: str) -> None:
    (job,) = jobs_of(ZOO, [task], (1000,), (), "cpu")
    rows = [row for row in verdicts(job)["rows"] if row["policy"] == policy]
    assert [row["constant"] for row in rows] == list(CONSTANTS)
    assert {row["truth"] for row in rows} == {truth}
    assert {row["verdict"] == "equal" for row in rows} == {truth == "healthy"}
    assert changed(rows) == []


class Tracer:
    """Answers with how often it was asked, and what it last recorded."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.recorded = 0

    def reference(self, *, steps: int) -> str:
        self.calls.append("reference")
        self.recorded = steps
        return f"{steps} steps"

    def trajectory(self, *, recipe: Recipe, seconds: float | None = None) -> str:
        self.calls.append("trajectory")
        return "run"

    def compare_steps(self, *, recipe: Recipe) -> str:
        self.calls.append("compare_steps")
        return f"compared at {self.recorded}"


def test_a_run_is_made_once_and_compared_where_it_was_asked_for() -> None:
    tracer = Tracer()
    runs: Any = Replayed(tracer)  # type: ignore[arg-type]
    recipe = Recipe(batch_size=8)
    for seconds in (1.0, 2.0):
        assert runs.trajectory(recipe=recipe, seconds=seconds) == "run"
    assert runs.reference(steps=30) == "30 steps"
    assert runs.reference(steps=60) == "60 steps"
    assert runs.reference(steps=30) == "30 steps"
    assert runs.compare_steps(recipe=recipe) == "compared at 30"
    assert tracer.calls == ["trajectory", *["reference"] * 3, "compare_steps"]
    assert runs.reference(steps=60) == "60 steps"
    assert runs.compare_steps(recipe=recipe) == "compared at 60"
    runs.reference(steps=30)
    assert runs.compare_steps(recipe=recipe) == "compared at 30"
    assert tracer.calls.count("compare_steps") == 2


def test_the_pairs_whose_verdict_depends_on_a_constant_are_counted_and_named() -> None:
    about = {"zoo": "zoo", "task": "t", "policy": "float16", "truth": "broken", "steps": 60}
    verdict = {"none": "rejected", "ten first losses": "equal", "crosses zero": "drift"}
    rows = [
        {**about, "task": task, "constant": name, "verdict": found, "reason": f"why {found}"}
        for task in ("t", "u")
        for name, found in verdict.items()
        if task == "t" or found != "equal"
    ]
    found = {"counts": counts(rows), "changed": changed(rows)}
    lines = list(constants_table(found))
    assert lines[2].startswith("| none | 2 of 2 (100.0 %")
    assert lines[3].startswith("| ten first losses | 0 of 1 (0.0 %")
    assert lines[-1] == "Pairs whose verdict depends on the constant: 1."
    (pair,) = found["changed"]
    assert (pair["task"], pair["verdicts"]) == ("t", verdict)
    assert pair["reasons"]["ten first losses"] == "why equal"
