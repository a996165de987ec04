"""A SLURM on this machine: srun as a program, one node in each partition.

`LocalSlurm` writes the program; a command that finds it on its PATH starts its jobs with it. A
partition's node takes one job after the other, as nodes do that are reserved with --exclusive, and
adds variables of its own to what srun was given. States go from PENDING by RUNNING to COMPLETED,
FAILED or NODE_FAIL. Only the options that autoprec uses are understood.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.fleet.local_programs import play, variables, write_programs, write_variables


class LocalSlurm:
    """The program, and what it has written; `folder` is a temporary one of its own."""

    def __init__(self, folder: Path, partitions: Mapping[str, Mapping[str, str]]) -> None:
        self.folder = folder
        write_programs(folder, __file__, ["srun"])
        write_variables(folder / "partitions", partitions)
        (folder / "jobs").mkdir()

    def variables(self) -> dict[str, str]:
        """Return what the environment of a command has besides."""
        return variables(self.folder)

    def jobs(self) -> list[dict[str, Any]]:
        """Return the jobs so far: options of srun, its variables, and state."""
        folders = sorted((self.folder / "jobs").iterdir(), key=lambda each: int(each.name))
        return [_facts(each) | {"state": _state(each)} for each in folders]

    def ended_jobs(self) -> list[dict[str, Any]]:
        """Wait for all jobs to end, then return them."""
        deadline = time.monotonic() + 60
        while any(each["state"] in ("PENDING", "RUNNING") for each in self.jobs()):
            assert time.monotonic() < deadline, self.jobs()
            time.sleep(0.05)
        return self.jobs()

    def fail_node(self, partition: str) -> None:
        """End the partition's running jobs, as if their node was switched off."""
        for job in (self.folder / "jobs").iterdir():
            if _state(job) == "RUNNING" and _facts(job)["options"]["partition"] == partition:
                _become(job, "NODE_FAIL")
                os.killpg(int((job / "process").read_text()), signal.SIGKILL)


def _facts(job: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((job / "facts").read_text())
    return facts


def _state(job: Path) -> str:
    return (job / "state").read_text()


def _become(job: Path, state: str) -> None:
    partial = job / f"state.{os.getpid()}"
    partial.write_text(state)
    partial.replace(job / "state")


def _new_job(slurm: Path, options: Mapping[str, str]) -> Path:
    partial = slurm / f"job-{os.getpid()}"
    partial.mkdir()
    asked = {name: value for name, value in os.environ.items() if name.startswith("SLURM_")}
    (partial / "facts").write_text(json.dumps({"options": options, "variables": asked}))
    _become(partial, "PENDING")
    number = 1
    while True:
        with contextlib.suppress(OSError):
            return partial.rename(slurm / "jobs" / str(number))
        number += 1


def srun(slurm: Path, words: list[str]) -> int:
    """Run the command after the options, when the partition's node is free."""
    options: dict[str, str] = {}
    while words[0].startswith("--"):
        name, _, value = words.pop(0).removeprefix("--").partition("=")
        options[name] = value
    partition = slurm / "partitions" / options["partition"]
    if not partition.is_file():
        print(f"srun: error: invalid partition specified: {partition.name}", file=sys.stderr)
        print("srun: error: Unable to allocate resources: Invalid partition", file=sys.stderr)
        return 1
    job = _new_job(slurm, options)
    with partition.open() as node:
        fcntl.flock(node, fcntl.LOCK_EX)
        given = {**json.loads(node.read()), "SLURMD_NODENAME": f"{partition.name}-0"}
        process = subprocess.Popen(words, env={**os.environ, **given}, start_new_session=True)
        (job / "process").write_text(str(process.pid))
        _become(job, "RUNNING")
        code = process.wait()
    if _state(job) == "NODE_FAIL":
        print(f"srun: error: Node failure on {partition.name}-0", file=sys.stderr)
    else:
        _become(job, "FAILED" if code else "COMPLETED")
    return abs(code)


if __name__ == "__main__":
    play(globals())
