"""A group of ranks: one call, one answer, and one failure for all, whichever rank it came from."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import MARK, survivors

from autoprec.core.measurement import Measurement
from autoprec.core.recipe import Recipe
from autoprec.core.speed.timing_budget import TimingBudget
from autoprec.workers import client, rank_group, timeouts
from autoprec.workers.client import Worker, WorkerSettings
from autoprec.workers.failures import FailureKind, WorkerFailure
from autoprec.workers.memory_limit import ERROR_REPORT_BYTES
from autoprec.workers.rank_group import RankGroup, start_workers
from autoprec.workers.runner import Runner
from autoprec.workers.task_source import TaskSource

TASK = """
import os
from pathlib import Path
from simulated import SimulatedModel

RANK = int(os.environ["RANK"])
{head}

def build_model():
    return SimulatedModel(**({fields} if RANK == {rank} else {{}}))

def build_data(batch_size):
    return []
"""
GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Connection closed by peer"

StartGroup = Callable[..., RankGroup]


@pytest.fixture
def group(tmp_path: Path) -> Iterator[StartGroup]:
    """Start a group whose rank `rank` has a model of these fields; none of it may be left."""
    made: list[RankGroup] = []
    mark = f"group-{os.getpid()}-{time.monotonic_ns()}"

    def begin(head: str = "", rank: int = 1, nproc: int = 2, **fields: Any) -> RankGroup:
        task = tmp_path / "ranks_task.py"
        task.write_text(TASK.format(head=head, fields=fields, rank=rank))
        made.append(
            RankGroup(WorkerSettings(TaskSource(task), nproc=nproc, environment={MARK: mark}))
        )
        return made[-1]

    yield begin
    for each in made:
        each.kill()
    assert survivors(mark) == []


def measure(group: RankGroup, **arguments: Any) -> Measurement:
    group.load()
    measured = group.call("measure", recipe=Recipe(), seed=0, budget=TimingBudget(), **arguments)
    assert isinstance(measured, Measurement)
    return measured


def failure_of(group: RankGroup) -> WorkerFailure:
    with pytest.raises(WorkerFailure) as info:
        measure(group)
    return info.value


def test_all_ranks_answer_and_rank_0_speaks_for_them(group) -> None:
    ranks = group(rank=0, samples=7)
    assert ranks.load() is ranks.load()
    assert measure(ranks).samples_per_step == 7
    assert len(set(ranks.pids)) == 2
    assert ranks.alive
    for pid in ranks.pids:
        os.kill(pid, 0)


def test_a_rank_finds_the_environment_that_torchrun_sets(group, tmp_path: Path) -> None:
    head = (
        "import json\n"
        f"Path({str(tmp_path)!r}, f'{{RANK}}.json').write_text(json.dumps(dict(os.environ)))"
    )
    group(head, nproc=3).load()
    seen = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(3)]
    assert [each["RANK"] for each in seen] == [each["LOCAL_RANK"] for each in seen]
    assert [each["RANK"] for each in seen] == ["0", "1", "2"]
    for name, value in (
        ("WORLD_SIZE", "3"),
        ("LOCAL_WORLD_SIZE", "3"),
        ("MASTER_ADDR", "127.0.0.1"),
    ):
        assert {each[name] for each in seen} == {value}
    (port,) = {each["MASTER_PORT"] for each in seen}
    assert 1024 <= int(port) < 65536


def test_one_rank_is_a_worker_alone(simulated) -> None:
    worker = start_workers(WorkerSettings(TaskSource(simulated())))
    try:
        assert isinstance(worker, Worker)
        assert worker.pids == (worker.pid,)
    finally:
        worker.kill()


def test_the_ranks_share_what_the_guards_may_let_them_have(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(client.memory_limit, "memory_budget", lambda free: 900)
    settings = WorkerSettings(TaskSource(tmp_path), nproc=3)
    assert settings.guard_bytes() == 300
    own = WorkerSettings(TaskSource(tmp_path), nproc=3, memory_bytes=500)
    assert own.guard_bytes() == 500 + ERROR_REPORT_BYTES  # a MemoryError comes first


FAULTS: dict[str, tuple[dict[str, Any], FailureKind, str]] = {
    "has no memory": ({"capacity_bytes": 1}, FailureKind.OUT_OF_MEMORY, "does not fit"),
    "exits": ({"exit_at_batch": 1}, FailureKind.EXITED, "exited with code 7"),
    "crashes": ({"crash_at_batch": 1}, FailureKind.SEGFAULT, "ended by SIGSEGV"),
    "raises": ({"unsupported": ("float32",)}, FailureKind.UNSUPPORTED, "primitive descriptor"),
}


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("fields", "kind", "said"), FAULTS.values(), ids=FAULTS)
def test_the_rank_that_fails_decides_and_ends_all(
    fields: dict[str, Any], kind: FailureKind, said: str, rank: int, group
) -> None:
    ranks = group(rank=rank, **fields)
    failure = failure_of(ranks)
    assert failure.kind is kind
    assert failure.message.startswith(f"rank {rank} of 2: ")
    assert said in failure.message
    assert not any(worker.alive for worker in ranks._workers)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_hangs_is_named_though_the_other_has_answered(
    rank: int, group, monkeypatch
) -> None:
    monkeypatch.setitem(timeouts.PHASE_TIMEOUT_SECONDS, "build", 1.0)
    ranks = group(rank=rank, hang_at_batch=1)
    failure = failure_of(ranks)
    assert failure.kind is FailureKind.TIMEOUT
    assert failure.message.startswith(f"rank {rank} of 2: no progress for 1 s")
    assert failure.phase == "build"
    assert not any(worker.alive for worker in ranks._workers)


def test_progress_is_rank_0s(group) -> None:
    ranks = group(rank=1, sleep_seconds=0.05)
    seen: list[tuple[str, int]] = []
    measure(ranks, on_progress=lambda phase, step: seen.append((phase, step)))
    assert seen[0] == ("build", 0)
    assert len([each for each in seen if each == ("build", 0)]) == 1


# What follows from a rank's end is not its cause -------------------------------------------------


def lonely(flag: Path, cause: str) -> str:
    """Return a task's head: in its steps rank 0 loses its peer, and rank 1 does this later."""
    return f"""
import time
from simulated import backend

def lose_peer(self, budget):
    while not Path({str(flag)!r}).exists():
        time.sleep(0.01)
    if RANK == 0:
        raise RuntimeError({GLOO!r})
    time.sleep(0.5)
    {cause}

def say_so(self, budget):
    Path({str(flag)!r}).touch()
    return lose_peer(self, budget)

backend.SimulatedSession.time_steps = say_so if RANK else lose_peer
"""


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        ("raise MemoryError('mine')", FailureKind.OUT_OF_MEMORY),
        ("os._exit(3)", FailureKind.EXITED),
        ("raise ValueError('mine')", FailureKind.USER_ERROR),
        ("os.kill(os.getpid(), 9)", FailureKind.KILLED),
    ],
)
def test_a_broken_connection_does_not_hide_its_cause(
    cause: str, kind: FailureKind, group, tmp_path: Path
) -> None:
    failure = failure_of(group(lonely(tmp_path / "flag", cause)))
    assert failure.kind is kind
    assert failure.message.startswith("rank 1 of 2: ")


def test_a_broken_connection_without_a_cause_is_the_failure(
    group, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(rank_group, "_CAUSE_WAIT_SECONDS", 0.5)
    failure = failure_of(group(lonely(tmp_path / "flag", "time.sleep(3600)")))
    assert failure.kind is FailureKind.LOST_PEER
    assert failure.message.startswith("rank 0 of 2: RuntimeError: [")


# Ends -------------------------------------------------------------------------------------------


def test_a_rank_that_died_between_calls_is_replaced_with_its_group(group, tmp_path: Path) -> None:
    first = group()
    made = [first]

    def start(settings: WorkerSettings) -> RankGroup:
        if len(made) > 1 or not first.alive:
            made.append(group())
        return made[-1]

    with Runner(first.settings, None, start) as runner:
        runner.load()
        os.kill(first.pids[1], signal.SIGKILL)
        deadline = time.monotonic() + 10
        while first.alive and time.monotonic() < deadline:
            time.sleep(0.01)
        runner.call("describe", batch_size=8, seed=0)
        assert runner.pids == made[-1].pids
        assert made[-1] is not first


def test_an_interrupt_ends_every_rank(group) -> None:
    def interrupt(phase: str, step: int) -> None:
        raise KeyboardInterrupt

    ranks = group()
    with pytest.raises(KeyboardInterrupt):
        ranks.load(interrupt)
    assert not any(worker.alive for worker in ranks._workers)


def test_a_group_that_another_thread_ends_fails(group) -> None:
    ranks = group()
    ranks.load()
    ranks.kill()
    with pytest.raises(WorkerFailure):
        ranks.call("describe", batch_size=8, seed=0)


def test_a_group_that_cannot_start_leaves_nothing(group, monkeypatch) -> None:
    started: list[Worker] = []

    def start(settings: WorkerSettings) -> Worker:
        if started:
            raise OSError("no more processes")
        started.append(Worker(settings))
        return started[0]

    monkeypatch.setattr(rank_group, "Worker", start)
    with pytest.raises(OSError, match="no more processes"):
        group()
    assert not started[0].alive


def test_descriptors_are_given_back(group) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0

    group().kill()
    before = count()
    for _ in range(3):
        ranks = group()
        ranks.load()
        ranks.close()
    assert count() == before
