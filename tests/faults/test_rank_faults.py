"""Faults of one rank among several: fifty at random, each in one phase of a job that trains.

The ranks exchange a value in every step, as a reduction of gradients does: who has lost a peer is
told so in Gloo's words, and who waits for one that lives waits for ever. So a fault shows in all
ranks, and the group must name the one it came from.
"""

from __future__ import annotations

import json
import os
import random
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import MARK, survivors

from autoprec.core.recipe import Recipe
from autoprec.core.speed.timing_budget import TimingBudget
from autoprec.workers import timeouts
from autoprec.workers.client import WorkerSettings
from autoprec.workers.failures import FailureKind, WorkerFailure
from autoprec.workers.rank_group import RankGroup
from autoprec.workers.task_source import TaskSource

pytestmark = [
    pytest.mark.scale,
    pytest.mark.skipif(os.name != "posix", reason="workers need POSIX"),
]

TASK = '''
import json, os, socket, time
from simulated import SimulatedModel, backend

FAULT = json.loads(os.environ["AUTOPREC_TEST_FAULT"])
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
GLOO = "[/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"
PEERS = []


def meet():
    """Connect every rank to rank 0, once."""
    if PEERS:
        return
    place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if RANK == 0:
        server = socket.create_server(place)
        PEERS.extend(server.accept()[0] for _ in range(WORLD - 1))
        return
    while True:
        try:
            PEERS.append(socket.create_connection(place))
            return
        except ConnectionRefusedError:
            time.sleep(0.01)


def reduce():
    """Wait until every rank is here."""
    meet()
    try:
        if RANK == 0:
            arrived = [peer.recv(1) for peer in PEERS]
            for peer in PEERS:
                peer.sendall(b"x")
        else:
            PEERS[0].sendall(b"x")
            arrived = [PEERS[0].recv(1)]
    except OSError as error:
        raise RuntimeError(GLOO) from error
    if b"" in arrived:
        raise RuntimeError(GLOO)


def strike(phase):
    """Fail here, if this is the rank and the phase that has the fault."""
    if (FAULT["rank"], FAULT["phase"]) != (RANK, phase):
        return
    time.sleep(FAULT["after"])
    match FAULT["kind"]:
        case "out of memory": raise MemoryError("mine")
        case "exception": raise ValueError("mine")
        case "exit": os._exit(3)
        case "kill": os.kill(os.getpid(), 9)
        case "hang": time.sleep(3600)
        case "nan": raise FloatingPointError("mine")


def joint(phase, method):
    """Let a method of the backend begin as a step does: by a fault, or with all ranks."""
    def call(*arguments, **settings):
        strike(phase)
        reduce()
        return method(*arguments, **settings)
    return call


strike("import")
for owner, name in (
    (backend.SimulatedBackend, "describe"),
    (backend.SimulatedBackend, "open"),
    (backend.SimulatedSession, "time_steps"),
    (backend.SimulatedTracer, "reference"),
    (backend.SimulatedTracer, "compare_steps"),
    (backend.SimulatedTracer, "trajectory"),
):
    setattr(owner, name, joint(name, getattr(owner, name)))

def build_model():
    strike("build")
    return SimulatedModel()

def build_data(batch_size):
    return []
'''
PHASES = (
    "import",
    "build",
    "describe",
    "open",
    "time_steps",
    "reference",
    "compare_steps",
    "trajectory",
)
KIND_OF = {
    "out of memory": FailureKind.OUT_OF_MEMORY,
    "exception": FailureKind.USER_ERROR,
    "exit": FailureKind.EXITED,
    "kill": FailureKind.KILLED,
    "hang": FailureKind.TIMEOUT,
    "nan": FailureKind.NONFINITE,
}
#: How long a rank that hangs is waited for, and one that a busy machine makes slow.
ALLOWED_SECONDS, PATIENT_SECONDS = 2.0, 30.0
FAULTS = 50
DRAWS = random.Random(31)


def draw() -> dict[str, object]:
    world = DRAWS.choice([2, 2, 3])
    return {
        "world": world,
        "rank": DRAWS.randrange(world),
        "phase": DRAWS.choice(PHASES),
        "kind": DRAWS.choice(list(KIND_OF)),
        "after": DRAWS.choice([0.0, 0.0, 0.05, 0.2]),
    }


def describe(fault: dict[str, object]) -> str:
    return "{kind} on rank {rank} of {world} in {phase}".format(**fault)


@pytest.fixture
def mark() -> Iterator[str]:
    """A value in the environment of every rank: none that carries it may be left."""
    chosen = uuid.uuid4().hex
    yield chosen
    assert survivors(chosen) == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", [draw() for _ in range(FAULTS)], ids=describe)
def test_one_ranks_fault_is_the_jobs_and_named(
    fault: dict[str, object], mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = ALLOWED_SECONDS if fault["kind"] == "hang" else PATIENT_SECONDS
    for phase in ("start", "load", "build", "describe"):
        monkeypatch.setitem(timeouts.PHASE_TIMEOUT_SECONDS, phase, allowed)
    task = tmp_path / "ranks.py"
    task.write_text(TASK)
    settings = WorkerSettings(
        TaskSource(task),
        nproc=int(str(fault["world"])),
        step_seconds=allowed,
        environment={MARK: mark, "AUTOPREC_TEST_FAULT": json.dumps(fault)},
    )
    group = RankGroup(settings)
    began = time.monotonic()
    with pytest.raises(WorkerFailure) as info:
        train(group)
    assert time.monotonic() - began < allowed + 30
    assert not any(worker.alive for worker in group._workers)
    failure = info.value
    who = f"rank {fault['rank']} of {fault['world']}: "
    if fault["kind"] == "hang":  # its peers make no progress either, and may be told of first
        assert failure.kind is FailureKind.TIMEOUT
        return
    expected = KIND_OF[str(fault["kind"])]
    if fault["phase"] == "import" and fault["kind"] == "nan":
        expected = FailureKind.USER_ERROR  # at import, any exception is the task file's
    assert (failure.kind, failure.message[: len(who)]) == (expected, who)


def train(group: RankGroup) -> None:
    """Make the calls of a tuning: describe, measure, prove."""
    recipe = Recipe()
    group.load()
    group.call("describe", batch_size=8, seed=0)
    group.call("measure", recipe=recipe, seed=0, budget=TimingBudget(max_steps=5))
    group.call("reference", batch_size=8, steps=8, checkpoints=(0, 2))
    group.call("compare_steps", recipe=recipe)
    group.call("trajectory", recipe=recipe, seed=0, steps=8)


def test_without_a_fault_the_job_trains(mark: str, tmp_path: Path) -> None:
    task = tmp_path / "ranks.py"
    task.write_text(TASK)
    fault = {"rank": -1, "phase": "none", "kind": "none", "after": 0}
    settings = WorkerSettings(
        TaskSource(task),
        nproc=3,
        environment={MARK: mark, "AUTOPREC_TEST_FAULT": json.dumps(fault)},
    )
    group = RankGroup(settings)
    train(group)
    group.close()
