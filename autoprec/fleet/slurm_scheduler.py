"""SLURM partitions, by `srun`: a short job in each probes a node, a long one tunes a type.

Each job is an `srun` process of this machine, and runs `autoprec.fleet.node` with a file that holds
the request; the node's messages are its output. Its input stays open as long as this process lives.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from autoprec.core.fleet.node_types import NodeReport
from autoprec.errors import UsageError
from autoprec.fleet.journals import studies_folder
from autoprec.fleet.messages import Message, NodeLost, NoRoom, Request, from_line
from autoprec.yaml_files import write_text

#: SLURM ends a job after this time; a tuning takes minutes, the slowest ones hours.
_JOB_MINUTES = 240

#: A partition whose job has not started by then has no room.
QUEUE_SECONDS = 600

#: A job whose stdin has ended ends by itself within this time.
_END_SECONDS = 10.0

_POLL_SECONDS = 0.5

#: What SLURM says, on stderr, of a job that it ended for lack of memory.
_OUT_OF_MEMORY = re.compile(r"out of memory|oom.?kill", re.IGNORECASE)
_PREFIX = re.compile(r"^(srun|slurmstepd\S*): (error: )?")


class SlurmScheduler:
    """Partitions of a SLURM cluster; what jobs are asked, and their logs, is beside the profiles.

    With `wait`, partitions that have no room are waited for.
    """

    def __init__(self, partitions: Sequence[str], output: Path, *, wait: bool = False) -> None:
        if shutil.which("srun") is None:
            raise UsageError(
                "`slurm`: there is no srun on this machine's PATH; run the command where SLURM's "
                "jobs are started, such as a login node"
            )
        self._partitions, self._wait = tuple(partitions), wait
        self._folder = studies_folder(output) / "jobs"
        self._jobs: list[SlurmJob] = []

    def __enter__(self) -> SlurmScheduler:
        return self

    def __exit__(self, *exception: object) -> None:
        for job in self._jobs:
            job.stop()

    def probe(self, request: Request) -> Sequence[NodeReport]:
        """Probe a node of every partition."""
        jobs = {name: self._start(name, request) for name in self._partitions}
        return [_wait_for_report(name, job) for name, job in jobs.items()]

    def start(self, node: NodeReport, request: Request) -> SlurmJob:
        """Start a job in the partition, on the machine that was probed."""
        return self._start(node.name, request, machine=node.node)

    def _start(self, partition: str, request: Request, machine: str = "") -> SlurmJob:
        words = ["srun", f"--partition={partition}", f"--job-name=autoprec-{partition}"]
        words += ["--quiet", "--nodes=1", "--ntasks=1", "--exclusive"]
        words += [f"--nodelist={machine}"] if machine else []
        words += [] if self._wait else [f"--immediate={QUEUE_SECONDS}"]
        file = self._folder / f"{partition}-{secrets.token_hex(4)}.request"
        write_text(file, request.to_line().decode())
        words += [sys.executable, "-m", "autoprec.fleet.node", str(file)]
        self._jobs.append(SlurmJob(words, file.with_suffix(".log")))
        return self._jobs[-1]


def _wait_for_report(partition: str, job: SlurmJob) -> NodeReport:
    """Wait for the answer of a probe."""
    try:
        while not (answers := job.receive()):
            time.sleep(_POLL_SECONDS)
    except NoRoom as full:
        return NodeReport(node="", name=partition, problem=str(full))
    except NodeLost as lost:
        return NodeReport(node="", name=partition, problem=f"its probe failed: {lost}")
    if isinstance(answers[0], NodeReport):
        return replace(answers[0], name=partition)
    return NodeReport(node="", name=partition, problem=f"its probe failed: {answers[0]}")


def job_environment(own: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of srun: what sbatch would be given, and no job that this one is in.

    sbatch's variables (SBATCH_ACCOUNT, SBATCH_GRES) have other names for srun (SLURM_ACCOUNT).
    """
    outside = {name: value for name, value in own.items() if not name.startswith("SLURM_")}
    given = {"SLURM_CONF": own["SLURM_CONF"]} if "SLURM_CONF" in own else {}
    given["SLURM_TIMELIMIT"] = str(_JOB_MINUTES)
    for name, value in own.items():
        if name.startswith("SBATCH_"):
            given[f"SLURM_{name.removeprefix('SBATCH_')}"] = value
    return {**outside, **given}


class SlurmJob:
    """A probe or a tuning in a job of SLURM: the session of a node."""

    def __init__(self, words: Sequence[str], log: Path) -> None:
        self._log, self._rest, self._began = log, b"", time.monotonic()
        self._answered = False
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=job_environment(os.environ),
                bufsize=0,
                start_new_session=True,  # Ctrl-C is this process's to handle
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        os.set_blocking(self._stdout.fileno(), False)

    def receive(self) -> Sequence[Message]:
        """Return what has arrived, without waiting."""
        content: bytes | None = self._stdout.read()
        *lines, self._rest = (self._rest + (content or b"")).split(b"\n")
        self._answered = self._answered or bool(lines)
        if not lines and content == b"" and self._process.poll() is not None:
            raise self._why_lost()
        return [from_line(line) for line in lines]

    def _why_lost(self) -> NodeLost | NoRoom:
        if not self._answered and time.monotonic() - self._began > QUEUE_SECONDS:
            return NoRoom(
                f"its job did not start within {QUEUE_SECONDS / 60:g} minutes; wait for it with "
                "`wait`"
            )
        text = self._log.read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        by_slurm = [_PREFIX.sub("", line) for line in lines if _PREFIX.match(line)]
        if any(_OUT_OF_MEMORY.search(line) for line in by_slurm):
            return NodeLost("SLURM ended its job for lack of memory", out_of_memory=True)
        why = "; ".join(by_slurm[-2:] or lines[-1:]) or f"exit code {self._process.returncode}"
        return NodeLost(f"its job ended: {why}")

    def stop(self) -> None:
        """End the job, if it has not ended."""
        for end in (self._stdin.close, self._process.terminate, self._process.kill):
            with contextlib.suppress(OSError):
                end()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
                break
        self._stdout.close()
