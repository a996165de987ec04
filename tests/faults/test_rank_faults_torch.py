"""Faults of one rank among two that train with PyTorch over Gloo.

`test_rank_faults` draws fifty where reductions are imitated; here is one of each kind with real
ones, whose peers wait in Gloo or are told by it that a rank is gone.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import MARK, survivors

from autoprec.core.recipe import Recipe
from autoprec.core.speed.timing_budget import TimingBudget
from autoprec.workers.client import WorkerSettings
from autoprec.workers.failures import FailureKind, WorkerFailure
from autoprec.workers.rank_group import RankGroup
from autoprec.workers.task_source import TaskSource
from tests.backends.torch.distributed.rank_tasks import write_task

pytestmark = [pytest.mark.torch, pytest.mark.scale]

HEAD = """
import json, os, time
from pathlib import Path

FAULT, RANK = json.loads(os.environ["AUTOPREC_TEST_FAULT"]), int(os.environ["RANK"])
LEFT = [3]

def strike():
    match FAULT["kind"]:
        case "out of memory": torch.empty(2**60)
        case "exception": raise ValueError("mine")
        case "exit": os._exit(3)
        case "kill": os.kill(os.getpid(), 9)
        case "hang": time.sleep(3600)
"""
STRIKING = """
def loss_fn(outputs, targets):
    loss = nn.functional.cross_entropy(outputs, targets)
    if RANK == FAULT["rank"] and Path(FAULT["armed"]).exists():
        LEFT[0] -= 1
        if LEFT[0] == 0:
            strike()
            return loss * float("nan")
    return loss
"""
BUDGET = TimingBudget(max_steps=8)
CALLS: dict[str, dict[str, Any]] = {
    "measure": {"recipe": Recipe(batch_size=4), "seed": 0, "budget": BUDGET},
    "reference": {"batch_size": 4, "steps": 8, "checkpoints": (0, 2)},
}
#: How long a rank that hangs is waited for, and one that a busy machine makes slow.
ALLOWED_SECONDS, PATIENT_SECONDS = 5.0, 60.0

StartFaulty = Callable[..., tuple[RankGroup, Path]]


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[StartFaulty]:
    """Start two ranks that train; one will have the fault after `arm`. None may be left."""
    mark, armed = uuid.uuid4().hex, tmp_path / "armed"
    groups: list[RankGroup] = []

    def begin(kind: str, rank: int, engine: Any) -> tuple[RankGroup, Path]:
        fault = {"kind": kind, "rank": rank, "armed": str(armed)}
        settings = WorkerSettings(
            TaskSource(write_task(tmp_path / "ranks.py", head=HEAD, more=STRIKING)),
            nproc=2,
            engine=engine,
            step_seconds=ALLOWED_SECONDS if kind == "hang" else PATIENT_SECONDS,
            environment={
                MARK: mark,
                "AUTOPREC_TEST_FAULT": json.dumps(fault),
                "OMP_NUM_THREADS": "1",
            },
        )
        groups.append(RankGroup(settings))
        groups[0].load()
        groups[0].call("describe", batch_size=4, seed=0)
        return groups[0], armed

    yield begin
    for group in groups:
        group.kill()
    assert survivors(mark) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "rank", "engine", "expected", "method"),
    [
        ("out of memory", 1, "ddp", FailureKind.OUT_OF_MEMORY, "measure"),
        ("out of memory", 0, "fsdp2", FailureKind.OUT_OF_MEMORY, "reference"),
        ("exception", 0, "ddp", FailureKind.USER_ERROR, "reference"),
        ("exit", 1, "ddp", FailureKind.EXITED, "measure"),
        ("kill", 1, "fsdp2", FailureKind.KILLED, "reference"),
        ("hang", 0, "ddp", FailureKind.TIMEOUT, "measure"),
        ("hang", 0, "ddp", FailureKind.TIMEOUT, "reference"),
    ],
)
def test_one_ranks_fault_ends_all_and_is_named(
    faulty: StartFaulty,
    kind: str,
    rank: int,
    engine: str,
    expected: FailureKind,
    method: str,
) -> None:
    group, armed = faulty(kind, rank, engine)
    armed.touch()
    began = time.monotonic()
    with pytest.raises(WorkerFailure) as info:
        group.call(method, **CALLS[method])
    assert time.monotonic() - began < PATIENT_SECONDS + 30
    assert not any(worker.alive for worker in group._workers)
    assert info.value.kind is expected
    if kind != "hang":  # its peers make no progress either, and may be told of first
        assert info.value.message.startswith(f"rank {rank} of 2: ")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_loss_that_is_not_finite_on_one_rank_is_so_for_all(
    faulty: StartFaulty, rank: int
) -> None:
    group, armed = faulty("nan", rank, "ddp")
    fine = group.call("measure", recipe=Recipe(batch_size=4), seed=0, budget=BUDGET)
    assert fine.finite
    armed.touch()
    found = group.call("measure", recipe=Recipe(batch_size=4), seed=0, budget=BUDGET)
    assert not found.finite
    group.close()
