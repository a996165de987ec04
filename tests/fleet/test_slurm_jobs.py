"""What becomes of a job of SLURM: its messages, its end, and what srun is told."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from autoprec.errors import UsageError
from autoprec.fleet import slurm_scheduler
from autoprec.fleet.messages import Message, NodeLost, NoRoom, to_line
from autoprec.fleet.slurm_scheduler import SlurmJob, SlurmScheduler, job_environment
from autoprec.tuning.events import Note


def job(program: str, tmp_path: Path) -> SlurmJob:
    return SlurmJob([sys.executable, "-c", f"import os, sys, time; {program}"], tmp_path / "log")


def ended(running: SlurmJob) -> NodeLost | NoRoom:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            running.receive()
        except (NodeLost, NoRoom) as end:
            running.stop()
            return end
    raise AssertionError("it goes on")


def test_messages_arrive_once_in_order_and_whole(tmp_path: Path) -> None:
    said = (to_line(Note("one")) + to_line(Note("two"))).decode()
    first, rest = said[:30].encode(), said[30:].encode()
    running = job(f"os.write(1, {first}); sys.stdin.read(); os.write(1, {rest})", tmp_path)
    arrived: list[Message] = []
    assert running.receive() == arrived
    running._stdin.close()
    with contextlib.suppress(NodeLost):
        while True:
            arrived += running.receive()
    running.stop()
    assert arrived == [Note("one"), Note("two")]


@pytest.mark.parametrize(
    ("lines", "reason", "memory"),
    [
        (["srun: error: Node failure on n1"], "its job ended: Node failure on n1", False),
        (["srun: error: n1: task 0: Out Of Memory"], "for lack of memory", True),
        (["slurmstepd-n1: error: Detected 1 oom_kill event in StepId=7.0"], "lack of memory", True),
        (["Traceback", "ValueError: oom-killer is a word"], "its job ended: ValueError", False),
        ([], "its job ended: exit code 3", False),
    ],
)
def test_the_end_of_a_job_says_what_slurm_says_of_it(
    lines: Sequence[str], reason: str, memory: bool, tmp_path: Path
) -> None:
    end = ended(job(f"print(*{lines!r}, sep='\\n', file=sys.stderr); sys.exit(3)", tmp_path))
    assert isinstance(end, NodeLost)
    assert reason in str(end)
    assert (end.out_of_memory, end.gone) == (memory, False)


def test_a_job_that_did_not_start_in_time_had_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm_scheduler, "QUEUE_SECONDS", 0)
    assert isinstance(ended(job("sys.exit(1)", tmp_path)), NoRoom)
    said = to_line(Note("here")).decode()
    assert isinstance(ended(job(f"os.write(1, {said!r}.encode())", tmp_path)), NodeLost)


def test_a_job_that_is_stopped_ends_by_its_input_or_by_a_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    polite = job("sys.stdin.read()", tmp_path)
    polite.stop()
    assert polite._process.returncode == 0
    monkeypatch.setattr(slurm_scheduler, "_END_SECONDS", 0.2)
    busy = job("time.sleep(600)", tmp_path)
    busy.stop()
    assert busy._process.returncode is not None
    assert busy._process.returncode < 0


def test_srun_is_told_what_sbatch_would_be_and_of_no_job_around_it() -> None:
    given = job_environment(
        {
            "PATH": "/bin",
            "SLURM_JOB_ID": "7",
            "SLURM_CONF": "/etc/slurm.conf",
            "SBATCH_ACCOUNT": "vision",
        }
    )
    assert given["SLURM_ACCOUNT"] == "vision"
    assert (given["SLURM_CONF"], given["PATH"]) == ("/etc/slurm.conf", "/bin")
    assert given["SLURM_TIMELIMIT"] == "240"
    assert "SLURM_JOB_ID" not in given
    assert job_environment({"SBATCH_TIMELIMIT": "60"})["SLURM_TIMELIMIT"] == "60"


def test_without_srun_the_command_says_where_to_run_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"no srun on this machine's PATH; run the command where"):
        SlurmScheduler(["fast"], tmp_path / "out")
