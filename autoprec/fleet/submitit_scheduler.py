"""SLURM partitions, by submitit: a short job in each probes a node, a long one tunes a type.

Where there is no SLURM, submitit runs the jobs on this machine. What sbatch needs besides a
partition (an account, GPUs, a time limit) it takes from its own variables: SBATCH_ACCOUNT,
SBATCH_GRES, SBATCH_TIMELIMIT.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from autoprec.core.fleet.node_types import NodeReport
from autoprec.errors import FrameworkMissing, UsageError
from autoprec.fleet import job_files
from autoprec.fleet.journals import studies_folder
from autoprec.fleet.messages import Ended, Message, Request, TaskPlace, request_to_line
from autoprec.fleet.scheduler import NodeLost, NoRoom

#: SLURM ends a job after this time; a tuning takes minutes, the slowest ones hours.
_JOB_MINUTES = 240

#: A partition whose job has not started by then has no room.
QUEUE_SECONDS = 600.0

_POLL_SECONDS = 0.5
_WAITING_STATES = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "UNKNOWN")
_OUT_OF_MEMORY_STATE = "OUT_OF_MEMORY"


def import_submitit() -> Any:
    """Import submitit; raise `FrameworkMissing` with what to install where it is not there."""
    try:
        import submitit
    except ImportError as error:
        raise FrameworkMissing(
            "`submitit`: submitit is not installed here; install it with "
            "`pip install 'autoprec[submitit]'`"
        ) from error
    return submitit


class SubmititScheduler:
    """Partitions of a SLURM cluster; jobs, their logs and messages are beside the profiles.

    With `wait`, partitions that have no room are waited for.
    """

    def __init__(self, partitions: Sequence[str], output: Path, *, wait: bool = False) -> None:
        self._submitit = import_submitit()
        self._partitions, self._wait = tuple(partitions), wait
        self._folder = studies_folder(output) / "jobs"
        self._lease = job_files.Lease(self._folder / "driver.lease")
        self._probes: list[Any] = []
        self._sessions: list[SubmititSession] = []

    def __enter__(self) -> SubmititScheduler:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for session in self._sessions:
            session.stop()
        for job in self._probes:
            if not job.done():
                _cancel(job)

    def probe(self, place: TaskPlace, device: str | None) -> Sequence[NodeReport]:
        """Probe a node of every partition."""
        jobs: dict[str, Any] = {}
        for name in self._partitions:
            jobs[name] = self._submit(
                self._executor(name, name), job_files.probe_job, place, device
            )
            self._probes.append(jobs[name])
        began = time.monotonic()
        while any(not job.done() for job in jobs.values()):
            late = not self._wait and time.monotonic() - began > QUEUE_SECONDS
            if late and all(job.done() or _is_waiting(job) for job in jobs.values()):
                break
            time.sleep(_POLL_SECONDS)
        return [self._report(name, job) for name, job in jobs.items()]

    def _report(self, partition: str, job: Any) -> NodeReport:
        if not job.done():
            _cancel(job)
            problem = (
                f"its job did not start within {QUEUE_SECONDS / 60:g} minutes; wait for it with "
                "`wait`"
            )
            return NodeReport(node="", name=partition, problem=problem)
        try:
            found: NodeReport = job.result()
        except Exception as error:  # whatever the job raised, or what SLURM did to it
            return NodeReport(node="", name=partition, problem=f"its probe failed: {_last(error)}")
        return replace(found, name=partition)

    def start(self, node: NodeReport, request: Request) -> SubmititSession:
        """Submit a tuning to the partition, on the machine that was probed."""
        name = f"{node.name}-{secrets.token_hex(4)}"
        messages = self._folder / f"{name}.messages"
        self._lease.renew()
        executor = self._executor(node.name, name, machine=node.node)
        lease = self._folder / "driver.lease"
        job = self._submit(executor, job_files.run_job, request_to_line(request), messages, lease)
        session = SubmititSession(job, messages, self._lease, self._wait)
        self._sessions.append(session)
        return session

    def _executor(self, partition: str, name: str, machine: str = "") -> Any:
        """Return what submits jobs to a partition, with whole machines reserved."""
        try:
            executor = self._submitit.AutoExecutor(folder=self._folder / name)
        except (OSError, RuntimeError) as error:
            raise UsageError(f"`submitit` cannot submit jobs here: {_last(error)}") from error
        only = {"nodelist": machine} if machine else {}
        executor.update_parameters(
            name=f"autoprec-{partition}",
            timeout_min=_JOB_MINUTES,
            slurm_partition=partition,
            slurm_exclusive=True,
            slurm_additional_parameters=only,
        )
        return executor

    def _submit(self, executor: Any, function: Any, *arguments: Any) -> Any:
        try:
            return executor.submit(function, *arguments)
        except Exception as error:  # sbatch's own, as submitit wraps it
            raise UsageError(
                f"`submitit`: the job was not accepted: {_last(error)}; check the partition's "
                "name, and give what sbatch needs besides in its variables, such as SBATCH_ACCOUNT"
            ) from error


def _cancel(job: Any) -> None:
    with contextlib.suppress(Exception):  # it may have ended meanwhile
        job.cancel(check=False)


def _is_waiting(job: Any) -> bool:
    return str(job.state).upper() in _WAITING_STATES


def _last(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" -")]
    return lines[-1] if lines else type(error).__name__


class SubmititSession:
    """A tuning in a batch job."""

    def __init__(self, job: Any, messages: Path, lease: job_files.Lease, wait: bool) -> None:
        self._job, self._lease, self._wait = job, lease, wait
        self._reader = job_files.MessageReader(messages)
        self._began = self._asked = time.monotonic()
        self._started = self._over = False

    def receive(self) -> Sequence[Message]:
        """Return what has arrived, without waiting."""
        self._lease.renew()
        found = self._reader.read()
        now = time.monotonic()
        if found or now - self._asked < _POLL_SECONDS:
            return self._noted(found)
        self._asked = now
        if self._job.done():
            found = self._reader.read()
            if not found:
                raise self._why_lost()
            return self._noted(found)
        late = not self._wait and now - self._began > QUEUE_SECONDS
        if late and not self._started and _is_waiting(self._job):
            raise NoRoom(
                f"its job did not start within {QUEUE_SECONDS / 60:g} minutes; wait for it with "
                "`wait`"
            )
        return ()

    def _noted(self, found: Sequence[Message]) -> Sequence[Message]:
        self._started = self._started or bool(found)
        self._over = self._over or any(isinstance(each, Ended) for each in found)
        return found

    def _why_lost(self) -> NodeLost:
        state = str(self._job.state).upper()
        if state == _OUT_OF_MEMORY_STATE:
            return NodeLost("SLURM ended its job for lack of memory", out_of_memory=True)
        error = self._job.exception()
        return NodeLost(
            f"its job ended ({state.lower()}): {_last(error) if error else 'no result'}"
        )

    def stop(self) -> None:
        """Cancel the job; one whose tuning is over ends by itself."""
        if not self._over and not self._job.done():
            _cancel(self._job)
