"""The parent's side of a worker: calls, allowances, and the end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autoprec.core.dtypes import Policy
from autoprec.core.measurement import Measurement, TaskFacts
from autoprec.core.recipe import Recipe
from autoprec.core.speed.timing_budget import TimingBudget
from autoprec.workers import client, timeouts
from autoprec.workers.client import Worker, WorkerSettings
from autoprec.workers.failures import FailureKind, WorkerFailure
from autoprec.workers.task_source import TaskSource


def test_a_worker_answers_many_calls(simulated, start) -> None:
    worker = start(simulated())
    assert worker.load() is worker.load()
    facts = worker.call("describe", batch_size=32, seed=0)
    assert isinstance(facts, TaskFacts)
    for policy in (Policy.FLOAT32, Policy.MIXED_BFLOAT16):
        measured = worker.call(
            "measure", recipe=Recipe(policy=policy), seed=0, budget=TimingBudget()
        )
        assert isinstance(measured, Measurement)
    assert worker.alive


def test_progress_is_told(simulated, start) -> None:
    worker = start(simulated(sleep_seconds=0.02))
    seen: list[tuple[str, int]] = []
    worker.load(lambda phase, step: seen.append((phase, step)))
    worker.call(
        "measure",
        recipe=Recipe(),
        seed=0,
        budget=TimingBudget(seconds=0.2, min_steps=20, precision=0.0),
        on_progress=lambda phase, step: seen.append((phase, step)),
    )
    assert [phase for phase, _ in seen][:3] == ["load", "build", "build"]
    assert seen[-1][0] == "steps"


def test_the_worker_is_not_its_guard(simulated, start) -> None:
    worker = start(simulated())
    worker.load()
    assert worker.pid not in (os.getpid(), worker._process.pid)
    os.kill(worker.pid, 0)


STARTED = """
import os, sys
assert sys.stdin.read() == "", "it reads what is typed"
assert os.getsid(0) != int(os.environ["SESSION_OF_THE_TUNER"]), "a Ctrl-C reaches it"
assert not [path for path in sys.path if path.endswith("workers")], "our modules hide others"
"""


def test_a_worker_has_no_part_in_the_terminal_and_hides_no_module(simulated, start) -> None:
    typed, end = os.pipe()
    os.write(end, b"typed")
    os.close(end)
    kept = os.dup(0)
    os.dup2(typed, 0)
    try:
        # An environment of its own: started as users start it, not forked.
        alone = {"SESSION_OF_THE_TUNER": str(os.getsid(0))}
        worker = start(simulated(), environment=alone)
    finally:
        os.dup2(kept, 0)
        os.close(kept)
        os.close(typed)
    task = worker.settings.task.path
    task.write_text(STARTED + task.read_text())
    worker.load()


def test_closing_twice_is_once(simulated, start) -> None:
    worker = start(simulated())
    worker.load()
    worker.close()
    worker.close()
    worker.kill()
    assert not worker.alive
    assert worker.printed() == ""


def test_a_call_after_the_end_is_a_failure(simulated, start) -> None:
    worker = start(simulated())
    worker.load()
    worker.kill()
    with pytest.raises(WorkerFailure):
        worker.call("describe", batch_size=8, seed=0)


def test_descriptors_are_given_back(simulated, start) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0

    task = simulated()
    start(task).kill()
    before = count()
    for _ in range(5):
        worker = start(task)
        worker.load()
        worker.close()
    assert count() == before


def test_an_interrupt_ends_the_worker(simulated, start) -> None:
    def interrupt(phase: str, step: int) -> None:
        raise KeyboardInterrupt

    worker = start(simulated())
    with pytest.raises(KeyboardInterrupt):
        worker.load(interrupt)
    assert not worker.alive


def test_a_failure_knows_its_phase(simulated, start) -> None:
    worker = start(simulated(capacity_bytes=1))
    worker.load()
    with pytest.raises(WorkerFailure) as info:
        worker.call("measure", recipe=Recipe(), seed=0, budget=TimingBudget())
    assert info.value.kind == FailureKind.OUT_OF_MEMORY
    assert info.value.phase == "build"
    assert worker.alive


def test_without_a_folder_for_logs_a_worker_still_runs(simulated, start, monkeypatch) -> None:
    def no_place(**_: object) -> object:
        raise FileNotFoundError("no usable temporary directory")

    monkeypatch.setattr(client.tempfile, "TemporaryFile", no_place)
    worker = start(simulated())
    assert worker.load()
    assert worker.printed() == ""


def test_a_worker_that_cannot_start_leaves_no_descriptor(simulated, monkeypatch) -> None:
    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
    monkeypatch.setattr(client.sys, "executable", "/no/such/python")
    with pytest.raises(OSError, match="No such file"):
        Worker(WorkerSettings(TaskSource(simulated())))
    after = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()
    assert after == before


# Allowances --------------------------------------------------------------------------------------


def allowance(worker: Worker, phase: str) -> float:
    worker._phase = phase
    return worker._allowance()


def test_every_phase_has_its_allowance(simulated, start) -> None:
    worker = start(simulated())
    for phase, seconds in timeouts.PHASE_TIMEOUT_SECONDS.items():
        assert allowance(worker, phase) == seconds
    assert allowance(worker, "trajectory") == timeouts.FIRST_STEP_TIMEOUT_SECONDS


def test_the_allowance_of_steps_follows_the_steps(simulated, start) -> None:
    worker = start(simulated())
    assert allowance(worker, "steps") == timeouts.FIRST_STEP_TIMEOUT_SECONDS
    worker._slowest_step = 0.01
    assert allowance(worker, "steps") == timeouts.MIN_STEP_TIMEOUT_SECONDS
    worker._slowest_step = 100.0
    assert allowance(worker, "steps") == 100.0 * timeouts.STEP_TIMEOUT_FACTOR


def test_a_hang_after_quick_steps_is_seen_by_their_time(simulated, start, monkeypatch) -> None:
    monkeypatch.setattr(timeouts, "MIN_STEP_TIMEOUT_SECONDS", 1.0)
    monkeypatch.setattr(timeouts, "STEP_TIMEOUT_FACTOR", 2.0)
    worker = start(simulated(sleep_seconds=0.02, hang_after_steps=30))
    worker.load()
    with pytest.raises(WorkerFailure) as info:
        worker.call(
            "measure",
            recipe=Recipe(),
            seed=0,
            budget=TimingBudget(min_steps=60, max_steps=60, seconds=60, precision=0.0),
        )
    assert info.value.kind == FailureKind.TIMEOUT
    assert info.value.phase == "steps"
    allowed = max(1.0, 2.0 * worker._slowest_step)
    assert allowed < timeouts.FIRST_STEP_TIMEOUT_SECONDS
    assert f"no progress for {allowed:.0f} s" in info.value.message


def test_the_hint_to_os_exit(tmp_path: Path, start) -> None:
    task = tmp_path / "leaves.py"
    task.write_text("import os\nos._exit(4)\n")
    with pytest.raises(WorkerFailure, match=r"code 4.*os\._exit"):
        start(task).load()
