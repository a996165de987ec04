"""Tunings in SLURM's partitions, whose srun is a program on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autoprec.profiles import load_folder
from tests.fleet.commands import QUICK, Command, built, wait_until, write_task
from tests.fleet.local_slurm import LocalSlurm
from tests.processes import undisturbed

pytestmark = [pytest.mark.scale, pytest.mark.slow]

Tune = Callable[..., Command]


@pytest.fixture
def slurm(tmp_path: Path) -> LocalSlurm:
    nodes = {name: {"NODE": f"{name}-0"} for name in ("fast", "slow")}
    return LocalSlurm(tmp_path / "slurm", nodes)


@pytest.fixture
def tune(tmp_path: Path, slurm: LocalSlurm) -> Iterator[Tune]:
    running: list[Command] = []
    (tmp_path / "locks").mkdir()
    own = {"AUTOPREC_REHEARSAL": "1", "TMPDIR": str(tmp_path / "locks"), **slurm.variables()}
    own |= undisturbed()

    def start(task: Path, *words: object) -> Command:
        process = subprocess.Popen(
            [sys.executable, "-m", "autoprec", "tune", *map(str, (task, *QUICK, *words))],
            env={**os.environ, **own},
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


def none_is_left(task: Path) -> bool:
    started = {line[each] for line in built(task) for each in ("tuner", "worker")}
    return not any(Path(f"/proc/{each}").exists() for each in started)


def test_partitions_that_are_of_one_type_share_one_profile(tune: Tune, tmp_path: Path) -> None:
    task = write_task(tmp_path / "a")
    command = tune(task, "--slurm", "fast,slow", "--json")
    code, out = command.end()
    assert code == 0, command.text
    (kind,) = json.loads(out)["types"]
    assert kind["nodes"] == ["fast", "slow"]
    assert list(load_folder(task.with_name("model.profiles"))) == [kind["file"]]
    assert len({line["tuner"] for line in built(task)}) == 1
    again = tune(task, "--submitit", "fast,slow")
    assert again.end()[0] == 0, again.text
    assert again.trials() == []


def test_a_job_that_is_killed_loses_no_finished_trial(
    tune: Tune, slurm: LocalSlurm, tmp_path: Path
) -> None:
    task = write_task(tmp_path / "b", step_seconds=0.01)
    command = tune(task, "--slurm", "fast")
    command.wait_for(r":   trial", count=2)
    known = command.trials()
    slurm.fail_node("fast")
    code, _ = command.end()
    assert code == 0, command.text
    assert "its job ended: Node failure on fast-0; finished trials are kept" in command.text
    assert command.trials()[: len(known)] == known
    assert len(command.trials()) == len(set(command.trials()))
    assert {line["node"] for line in built(task)} == {"fast-0"}
    jobs = slurm.ended_jobs()
    assert [each["state"] for each in jobs] == ["COMPLETED", "NODE_FAIL", "COMPLETED"]
    assert [each["options"].get("nodelist") for each in jobs] == [None, "fast-0", "fast-0"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_command_that_ends_leaves_no_process_and_the_same_one_resumes(
    tune: Tune, slurm: LocalSlurm, number: signal.Signals, tmp_path: Path
) -> None:
    task = write_task(tmp_path / "c", step_seconds=0.05)
    command = tune(task, "--slurm", "fast")
    command.wait_for(r":   trial", count=2)
    command.process.send_signal(number)
    code, _ = command.end()
    known = command.trials()
    if number == signal.SIGINT:
        assert code == 130, command.text
        assert "finished trials are kept in" in command.text
    wait_until(lambda: none_is_left(task))
    assert [each["state"] for each in slurm.ended_jobs()] == ["COMPLETED", "FAILED"]
    again = tune(task, "--slurm", "fast")
    assert again.end()[0] == 0, again.text
    assert not set(known) & set(again.trials())


def test_a_partition_that_slurm_does_not_know_is_a_usage_error(tune: Tune, tmp_path: Path) -> None:
    command = tune(write_task(tmp_path / "f"), "--slurm", "fats")
    code, _ = command.end()
    assert code == 2, command.text
    assert "invalid partition specified: fats" in command.text
    assert "Traceback" not in command.text
