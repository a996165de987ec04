"""The whole tuning of one job on several ranks, on the simulated backend."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoprec.api import tune
from autoprec.core.dtypes import DType, Policy
from autoprec.core.profile import Profile
from autoprec.core.recipe import Distributed
from autoprec.core.speed.trial_results import Status
from autoprec.errors import TaskError
from autoprec.profiles import load_profile
from autoprec.tuning.events import Event, TrialFinished
from tests.tuning.flow.test_tuner import FASTER

pytestmark = [
    pytest.mark.usefixtures("unmeasured", "in_process"),
    pytest.mark.skipif(
        os.name != "posix" or len(os.sched_getaffinity(0)) < 2,
        reason="two ranks need two processors, and workers POSIX",
    ),
]

TASK = """
import os
from simulated import SimulatedModel

BATCH_SIZE = {batch_size}

def build_model():
    return SimulatedModel({arguments})

def build_data(batch_size):
    return []
"""


@pytest.fixture
def task(tmp_path: Path) -> Callable[..., Path]:
    """Write a task of a fixed batch, whose model has these arguments."""

    def write(arguments: str = "", batch_size: int = 64) -> Path:
        path = tmp_path / "ranks_task.py"
        path.write_text(TASK.format(arguments=f"{FASTER}, {arguments}", batch_size=batch_size))
        return path

    return write


def run(path: Path, **settings: Any) -> tuple[Profile, list[TrialFinished]]:
    events: list[Event] = []
    known = {"rounds": 5, "nproc": 2, "policies": ("float32", "mixed_bfloat16")}
    profile = tune(path, listener=events.append, device="cpu", **{**known, **settings})
    return profile, [event for event in events if isinstance(event, TrialFinished)]


def ranks_of(profile: Profile) -> Distributed:
    assert profile.recipe.distributed is not None
    return profile.recipe.distributed


def test_a_reduction_that_steps_wait_for_is_rounded_and_the_profile_says_all_of_it(
    task: Callable[..., Path], tmp_path: Path
) -> None:
    profile, trials = run(task("reduction_seconds=0.02"))
    assert load_profile(tmp_path / "ranks_task.profile.yaml") == profile
    ranks = ranks_of(profile)
    assert (ranks.engine, ranks.world_size) == ("ddp", 2)
    assert ranks.reduce_dtype is DType.BFLOAT16
    assert ranks.bucket_mb == 25  # tried, for steps wait; it brought nothing
    assert any(trial.recipe.distributed.bucket_mb == 100 for trial in trials)
    assert {trial.recipe.effective_batch for trial in trials} == {64}
    evidence = profile.evidence
    assert evidence.parity.reason.endswith("; checked at 2 ranks with DDP")
    assert "reduction" in [part.what for part in evidence.waterfall]
    before, now = evidence.baseline.exposed_communication, evidence.chosen.exposed_communication
    assert before is not None
    assert now is not None
    assert before.ratio > 0.3
    assert 0 < now.ratio < 1


def test_a_reduction_that_nothing_waits_for_stays_in_float32(task: Callable[..., Path]) -> None:
    profile, trials = run(task("reduction_seconds=0.0"))
    assert profile.recipe.policy is Policy.MIXED_BFLOAT16
    assert ranks_of(profile) == Distributed("ddp", 2)
    assert any(trial.recipe.distributed.rounds_gradients for trial in trials)
    assert all(trial.recipe.distributed.bucket_mb == 25 for trial in trials)


def test_a_rounded_reduction_that_breaks_training_is_refused_by_its_proof(
    task: Callable[..., Path],
) -> None:
    profile, _ = run(task("reduction_seconds=0.02, reduction_breaks=True"))
    assert profile.recipe.policy is Policy.MIXED_BFLOAT16
    assert ranks_of(profile).reduce_dtype is DType.FLOAT32
    assert any("reduce_dtype=bfloat16" in each.reason for each in profile.evidence.refusals)


def test_fsdp2_gathers_in_the_policys_dtype(task: Callable[..., Path]) -> None:
    profile, _ = run(task("reduction_seconds=0.02"), engine="fsdp2")
    ranks = ranks_of(profile)
    assert (ranks.engine, ranks.param_dtype) == ("fsdp2", DType.BFLOAT16)
    assert profile.evidence.parity.reason.endswith("; checked at 2 ranks with FSDP2")


def test_a_batch_that_cannot_be_divided_among_the_ranks_ends_the_run(
    task: Callable[..., Path],
) -> None:
    with pytest.raises(TaskError, match="BATCH_SIZE = 33 is the batch of all ranks together"):
        run(task(batch_size=33))


def test_a_rank_without_memory_ends_its_trial_and_not_the_tuning(
    task: Callable[..., Path],
) -> None:
    limit = "capacity_bytes=2**30 if os.environ['RANK'] == '0' else 220 * 2**20"
    profile, trials = run(task(limit))
    assert "RANK" not in os.environ, "a worker's variables are its own"
    failed = [each.outcome for each in trials if each.outcome.status is Status.OUT_OF_MEMORY]
    assert failed
    assert all(outcome.reason.startswith("rank 1 of 2: ") for outcome in failed)
    assert profile.recipe.batch_size <= 16
    assert profile.recipe.effective_batch == 64


def test_one_process_and_ranks_are_two_studies(task: Callable[..., Path]) -> None:
    path = task()
    assert run(path)[1]
    alone, trials = run(path, nproc=1)
    assert trials
    assert alone.recipe.distributed is None
    assert run(path)[1] == []  # answered from its own study
