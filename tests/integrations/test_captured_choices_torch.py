"""The projects of examples/trainers, tuned as they stand, choose what their task files choose.

The choice is what does not depend on a clock: the recipes that are admitted, the first losses, and
the verdicts of the proof.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autoprec import Policy, Recipe, probe
from autoprec.core.device.policies import propose
from autoprec.core.numerics.verdict import Verdict
from autoprec.tuning.events import silent
from autoprec.tuning.flow.preflight import describe, load_task
from autoprec.tuning.job import Target, TuningJob
from autoprec.tuning.options import Options
from autoprec.tuning.proof.recipe_proof import Proof
from autoprec.tuning.search.task_space import build_space, refusals_for_task
from autoprec.workers.runner import RemoteTracer
from autoprec.workers.task_source import TaskSource
from benchmarks.overhead.captured_projects import WRITTEN, sources_of

pytest.importorskip("torch")
pytest.importorskip("lightning")
pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.release,
    pytest.mark.slow,
    pytest.mark.usefixtures("workers_with_trainers"),
    pytest.mark.skipif(os.name != "posix", reason="workers need POSIX"),
]

BATCHES = (8, 16, 64)
POLICIES = (Policy.FLOAT32, Policy.MIXED_BFLOAT16)


@dataclass(frozen=True)
class Choice:
    """What a tuning on this CPU may choose, and what its proof says."""

    batch: Any
    recipes: Any
    refused: Any
    verdict: Verdict
    losses: tuple[tuple[float, ...], ...]


def choice_of(source: TaskSource) -> Choice:
    machine = probe(device="cpu")
    target = Target(machine.devices[0].facts, machine.software, lambda facts, _: facts)
    job = TuningJob(source, target, Options(policies=POLICIES), silent)
    with job.runner() as runner:
        loaded = load_task(job, runner)
        task = describe(job, runner)
        space = build_space(job, task, target.facts, propose(target.facts, POLICIES))
        plain = space.recipe(space.points()[0])
        recipe = Recipe(POLICIES[1], plain.batch_size, plain.accumulation_steps)
        losses = [
            runner.call("trajectory", recipe=Recipe(batch_size=size), seed=0, steps=3).losses
            for size in BATCHES
        ]
        return Choice(
            batch=(loaded.batch_size, loaded.clip_grad_norm, task.samples, task.split_reason),
            recipes=space.points(),
            refused=refusals_for_task(job, task, target.facts, space),
            verdict=Proof(RemoteTracer(runner), steps=8).prove(recipe),
            losses=tuple(losses),
        )


@pytest.mark.parametrize("trainer", list(WRITTEN))
def test_a_project_as_it_stands_chooses_what_its_task_file_chooses(
    trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    captured, written = map(choice_of, sources_of(trainer, tmp_path))
    for found, expected in zip(captured.losses, written.losses, strict=True):
        assert found[0] == pytest.approx(expected[0], rel=1e-6)
        assert found == pytest.approx(expected, rel=1e-4)  # the optimizer is the same, too
    splits = trainer == "transformers"  # by the update's tokens, of which no task file can tell
    assert captured.batch == (*written.batch[:-1], "" if splits else written.batch[-1])
    assert bool(written.batch[-1]) or not splits
    admitted = [point for point in captured.recipes if point in written.recipes]
    assert admitted == written.recipes
    assert splits or captured.recipes == written.recipes
    assert len(written.recipes) > 2
    assert captured.refused == written.refused
    assert captured.verdict.verdict == written.verdict.verdict
