"""Batch jobs by submitit: without SLURM, as it runs them on one machine, and with a local one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autoprec.errors import TrialFailure
from autoprec.fleet import submitit_scheduler
from autoprec.fleet.job_files import MessageWriter
from autoprec.fleet.messages import Ended
from autoprec.fleet.scheduler import NodeLost, NoRoom
from autoprec.profiles import load_folder
from tests.fleet.commands import QUICK, Command, built, wait_until, write_task
from tests.fleet.local_slurm import LocalSlurm

pytestmark = [
    pytest.mark.scale,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("srun") is not None, reason="SLURM would be asked"),
]

ROOT = Path(__file__).parents[2]
Tune = Callable[..., Command]


@pytest.fixture
def tune(tmp_path: Path) -> Iterator[Tune]:
    running: list[Command] = []
    locks = tmp_path / "locks"
    locks.mkdir()

    def start(task: Path, *words: object, **variables: str) -> Command:
        process = subprocess.Popen(
            [sys.executable, "-m", "autoprec", "tune", *map(str, (task, *QUICK, *words))],
            env={
                **os.environ,
                "AUTOPREC_REHEARSAL": "1",
                "TMPDIR": str(locks),
                **variables,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(Command(process))
        return running[-1]

    yield start
    for each in running:
        if each.process.poll() is None:
            each.kill()


def test_partitions_that_are_of_one_type_share_one_profile(tune: Tune, tmp_path: Path) -> None:
    task = write_task(tmp_path / "a")
    command = tune(task, "--submitit", "fast,slow", "--json")
    code, out = command.end()
    assert code == 0, command.text
    (kind,) = json.loads(out)["types"]
    assert kind["nodes"] == ["fast", "slow"]
    assert list(load_folder(task.with_name("model.profiles"))) == [kind["file"]]
    assert len({line["tuner"] for line in built(task)}) == 1
    again = tune(task, "--submitit", "fast,slow")
    assert again.end()[0] == 0, again.text
    assert again.trials() == []


def test_a_job_that_is_killed_loses_no_finished_trial(tune: Tune, tmp_path: Path) -> None:
    task = write_task(tmp_path / "b", step_seconds=0.01)
    command = tune(task, "--submitit", "fast")
    command.wait_for(r":   trial", count=2)
    known = command.trials()
    (tuner,) = {line["tuner"] for line in built(task)}
    os.kill(tuner, signal.SIGKILL)
    code, _ = command.end()
    assert code == 0, command.text
    assert "finished trials are kept" in command.text
    assert command.trials()[: len(known)] == known
    assert len(command.trials()) == len(set(command.trials()))


def test_an_interrupt_cancels_the_jobs_and_the_same_command_resumes(
    tune: Tune, tmp_path: Path
) -> None:
    task = write_task(tmp_path / "c", step_seconds=0.01)
    command = tune(task, "--submitit", "fast")
    command.wait_for(r":   trial", count=2)
    known = command.trials()
    command.process.send_signal(signal.SIGINT)
    code, _ = command.end()
    assert code == 130, command.text
    assert "finished trials are kept in" in command.text
    started = {line[each] for line in built(task) for each in ("tuner", "worker")}
    wait_until(lambda: not any(Path(f"/proc/{each}").exists() for each in started))
    again = tune(task, "--submitit", "fast")
    assert again.end()[0] == 0, again.text
    assert not set(known) & set(again.trials())


@pytest.fixture
def slurm(tmp_path: Path) -> LocalSlurm:
    return LocalSlurm(tmp_path / "slurm", {"fast": {"NODE": "fast-0"}})


def test_a_job_whose_node_fails_is_submitted_again_and_loses_no_finished_trial(
    tune: Tune, slurm: LocalSlurm, tmp_path: Path
) -> None:
    task = write_task(tmp_path / "d", step_seconds=0.01)
    command = tune(task, "--submitit", "fast", **slurm.variables())
    command.wait_for(r":   trial", count=2)
    known = command.trials()
    slurm.fail_node("fast")
    code, _ = command.end()
    assert code == 0, command.text
    assert "its job ended (node_fail)" in command.text
    assert "finished trials are kept" in command.text
    assert command.trials()[: len(known)] == known
    assert len(command.trials()) == len(set(command.trials()))
    assert {line["node"] for line in built(task)} == {"fast-0"}
    assert [each["state"] for each in slurm.ended_jobs()] == ["COMPLETED", "NODE_FAIL", "COMPLETED"]


def test_an_interrupt_leaves_no_job_in_slurm(tune: Tune, slurm: LocalSlurm, tmp_path: Path) -> None:
    task = write_task(tmp_path / "e", step_seconds=0.01)
    command = tune(task, "--submitit", "fast", **slurm.variables())
    command.wait_for(r":   trial", count=2)
    command.process.send_signal(signal.SIGINT)
    code, _ = command.end()
    assert code == 130, command.text
    assert [each["state"] for each in slurm.ended_jobs()] == ["COMPLETED", "CANCELLED"]
    started = {line[each] for line in built(task) for each in ("tuner", "worker")}
    wait_until(lambda: not any(Path(f"/proc/{each}").exists() for each in started))


def test_a_partition_that_slurm_does_not_know_is_a_usage_error(
    tune: Tune, slurm: LocalSlurm, tmp_path: Path
) -> None:
    command = tune(write_task(tmp_path / "f"), "--submitit", "fats", **slurm.variables())
    code, _ = command.end()
    assert code == 2, command.text
    assert "invalid partition specified: fats" in command.text
    assert "Traceback" not in command.text


class FakeJob:
    """A job of SLURM in a given state."""

    def __init__(self, state: str, *, done: bool, error: Exception | None = None) -> None:
        self.state, self._done, self._error = state, done, error
        self.cancelled = False

    def done(self) -> bool:
        return self._done

    def exception(self) -> Exception | None:
        return self._error

    def cancel(self, *, check: bool = True) -> None:
        self.cancelled = True


def session(
    job: FakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, wait: bool = False
) -> submitit_scheduler.SubmititSession:
    monkeypatch.setattr(submitit_scheduler, "_POLL_SECONDS", 0.0)
    lease = submitit_scheduler.job_files.Lease(tmp_path / "lease")
    return submitit_scheduler.SubmititSession(job, tmp_path / "messages", lease, wait)


def test_what_slurm_ended_for_lack_of_memory_is_out_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = FakeJob("OUT_OF_MEMORY", done=True)
    with pytest.raises(NodeLost) as lost:
        session(job, tmp_path, monkeypatch).receive()
    assert lost.value.out_of_memory
    job = FakeJob("NODE_FAIL", done=True, error=RuntimeError("---\nthe node failed\n---"))
    with pytest.raises(NodeLost, match=r"node_fail\): the node failed") as lost:
        session(job, tmp_path, monkeypatch).receive()
    assert not lost.value.out_of_memory


def test_a_partition_where_no_job_starts_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submitit_scheduler, "QUEUE_SECONDS", -1.0)
    waiting = FakeJob("PENDING", done=False)
    with pytest.raises(NoRoom, match="its job did not start"):
        session(waiting, tmp_path, monkeypatch).receive()
    assert session(waiting, tmp_path, monkeypatch, wait=True).receive() == ()
    assert session(FakeJob("RUNNING", done=False), tmp_path, monkeypatch).receive() == ()


def test_a_job_is_cancelled_only_while_its_tuning_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, write = FakeJob("RUNNING", done=False), MessageWriter(tmp_path / "messages")
    running = session(job, tmp_path, monkeypatch)
    write(Ended(error=TrialFailure("it broke")))
    assert len(running.receive()) == 1
    running.stop()
    assert not job.cancelled  # it ends by itself
    session(job, tmp_path, monkeypatch).stop()
    assert job.cancelled
