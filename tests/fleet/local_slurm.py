"""A SLURM on this machine: sbatch, srun, sacct and scancel as programs, one node in each partition.

`LocalSlurm` writes the programs; a command that finds them on its PATH submits its jobs to them. A
partition's node takes one job after the other, as nodes do that are reserved with --exclusive, and
adds variables of its own to what sbatch was given. States go from PENDING by RUNNING to COMPLETED,
FAILED, CANCELLED or NODE_FAIL. Only the options that submitit uses are understood.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.fleet.local_programs import play, variables, write_programs, write_variables

PROGRAMS = ("sbatch", "srun", "sacct", "scancel")


class LocalSlurm:
    """The programs, and what they have written; `folder` is a temporary one of its own."""

    def __init__(self, folder: Path, partitions: Mapping[str, Mapping[str, str]]) -> None:
        self.folder = folder
        write_programs(folder, __file__, PROGRAMS)
        write_variables(folder / "partitions", partitions)
        (folder / "jobs").mkdir()

    def variables(self) -> dict[str, str]:
        """Return what the environment of a command has besides."""
        return variables(self.folder)

    def jobs(self) -> list[dict[str, Any]]:
        """Return the jobs so far: options of sbatch, its variables, and state."""
        folders = sorted((self.folder / "jobs").iterdir(), key=lambda each: int(each.name))
        return [_facts(each) | {"state": _state(each)} for each in folders]

    def ended_jobs(self) -> list[dict[str, Any]]:
        """Wait for all jobs to end, then return them.

        As in a real SLURM a job has written its result before its state tells that it ended.
        """
        deadline = time.monotonic() + 60
        while any(each["state"] in ("PENDING", "RUNNING") for each in self.jobs()):
            assert time.monotonic() < deadline, self.jobs()
            time.sleep(0.05)
        return self.jobs()

    def fail_node(self, partition: str) -> None:
        """End the partition's running jobs, as if their node was switched off."""
        for folder in (self.folder / "jobs").iterdir():
            running = _state(folder) == "RUNNING"
            if running and _facts(folder)["options"]["partition"] == partition:
                _end(folder, "NODE_FAIL", signal.SIGKILL)


def _facts(job: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((job / "facts").read_text())
    return facts


def _state(job: Path) -> str:
    return (job / "state").read_text()


def _become(job: Path, state: str) -> None:
    partial = job / f"state.{os.getpid()}"
    partial.write_text(state)
    partial.replace(job / "state")


def _end(job: Path, state: str, *signals: signal.Signals) -> None:
    """End the job's processes; all but the first signal come a second after the last."""
    _become(job, state)
    group = int((job / "process").read_text())
    first, *later = signals
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, first)
    for each in later:
        subprocess.Popen(
            ["sh", "-c", f"sleep 1; kill -{each.value} -- -{group}"],
            start_new_session=True,
            stderr=subprocess.DEVNULL,
        )


def sbatch(slurm: Path, words: list[str]) -> None:
    """Submit the script in the last word."""
    script = Path(words[-1]).read_text()
    found = re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", script, re.M)
    options = {name: "".join(shlex.split(value)) for name, value in found}
    partition = options.get("partition", "")
    if not (slurm / "partitions" / partition).is_file():
        sys.exit(f"sbatch: error: invalid partition specified: {partition}")
    number = 1 + sum(1 for _ in (slurm / "jobs").iterdir())
    while True:
        job = slurm / "jobs" / str(number)
        partial = slurm / f"job-{os.getpid()}"
        partial.mkdir(exist_ok=True)
        asked = {name: value for name, value in os.environ.items() if name.startswith("SBATCH_")}
        (partial / "facts").write_text(json.dumps({"options": options, "variables": asked}))
        (partial / "script").write_text(script)
        _become(partial, "PENDING")
        try:
            partial.rename(job)
        except OSError:
            number += 1
        else:
            break
    process = subprocess.Popen(
        [sys.executable, __file__, "run", str(number)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    (job / "process").write_text(str(process.pid))
    print(f"Submitted batch job {number}")


def run(slurm: Path, words: list[str]) -> None:
    """Run a submitted job when its partition's node is free; a process of its own does this."""
    (number,) = words
    job = slurm / "jobs" / number
    options = _facts(job)["options"]
    partition = slurm / "partitions" / options["partition"]
    given = {
        "SLURM_JOB_ID": number,
        "SLURM_JOB_NODELIST": f"{partition.name}-0",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NTASKS": "1",
    }
    with partition.open() as node:
        fcntl.flock(node, fcntl.LOCK_EX)
        if _state(job) != "PENDING":
            return
        _become(job, "RUNNING")
        with open(options["output"].replace("%j", number), "ab") as output:
            code = subprocess.call(
                ["bash", str(job / "script")],
                env={**os.environ, **json.loads(node.read()), **given},
                stdout=output,
                stderr=output,
            )
    if _state(job) == "RUNNING":
        _become(job, "FAILED" if code else "COMPLETED")


def srun(slurm: Path, words: list[str]) -> None:
    """Become the command after the options."""
    place = {}
    while words[0].startswith("--"):
        option = words.pop(0)
        if option in ("--output", "--error"):
            place[option] = words.pop(0)
    for option, stream in (("--output", 1), ("--error", 2)):
        name = place[option].replace("%j", os.environ["SLURM_JOB_ID"]).replace("%t", "0")
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), stream)
    ranks = dict.fromkeys(("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"), "0")
    os.execvpe(words[0], words, {**os.environ, **ranks})


def sacct(slurm: Path, words: list[str]) -> None:
    """Print the states of the jobs that are asked for, and of their steps."""
    print("JobID|State|NodeList")
    for option, number in itertools.pairwise(words):
        if option == "-j" and (slurm / "jobs" / number).is_dir():
            job = slurm / "jobs" / number
            state, node = _state(job), f"{_facts(job)['options']['partition']}-0"
            print(f"{number}|{state}|{node}\n{number}.batch|{state}|{node}")


def scancel(slurm: Path, words: list[str]) -> None:
    """Cancel a job: SIGTERM, then SIGKILL."""
    job = slurm / "jobs" / words[0]
    if _state(job) in ("PENDING", "RUNNING"):
        _end(job, "CANCELLED", signal.SIGTERM, signal.SIGKILL)


if __name__ == "__main__":
    play(globals())
