"""A trial on several devices: one worker a rank, which answer a call together or fail together.

Each rank is a `Worker` with a guard of its own, and finds the environment that torchrun would give
it. A call goes to all ranks at once; rank 0's answer is the group's. No collective decides about
failures: a rank that failed but lives would leave the others waiting for the process group's
timeout (30 minutes by default). Here the tuner, which reads every rank's channel, ends all of them
at the first failure and reports that one.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from autoprec.backends.protocol import ProgressCallback, RankPlace
from autoprec.core.device.observation import DeviceKind
from autoprec.workers.client import Worker, WorkerSettings
from autoprec.workers.environment import rank_environment
from autoprec.workers.failures import FailureKind, WorkerFailure
from autoprec.workers.handlers import LoadedTask

_ADDRESS = "127.0.0.1"

#: How long a rank that lost its peers waits for the one that was the cause. A process's descriptors
#: are closed in the order of their numbers and ours is among the last, so its peers may know of its
#: end first; before ours a GPU's driver closes its own, which can take seconds.
_CAUSE_WAIT_SECONDS = 5.0


def start_workers(settings: WorkerSettings) -> Worker | RankGroup:
    """Start what runs the trials: a worker, or a group of them if several ranks train."""
    return Worker(settings) if settings.nproc == 1 else RankGroup(settings)


class RankGroup:
    """The workers of one job's ranks, with the interface of one `Worker`."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self.loaded: LoadedTask | None = None
        self._workers: list[Worker] = []
        port = _free_port()
        try:
            for rank in range(settings.nproc):
                self._workers.append(Worker(_settings_of_rank(settings, rank, port)))
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """Return the process ids of all ranks."""
        return tuple(pid for worker in self._workers for pid in worker.pids)

    @property
    def alive(self) -> bool:
        """Return whether every rank's process still runs."""
        return all(worker.alive for worker in self._workers)

    def load(self, on_progress: ProgressCallback | None = None) -> LoadedTask:
        """Load the task in every rank, once; return what rank 0 found."""
        if self.loaded is None:
            arguments = [worker.load_arguments() for worker in self._workers]
            self.loaded = self._call("load", arguments, on_progress)
        return self.loaded

    def call(
        self, method: str, *, on_progress: ProgressCallback | None = None, **arguments: Any
    ) -> Any:
        """Call a method of every rank's `Service`; return rank 0's result when all have answered.

        `WorkerFailure` says which rank failed first, and all of them are ended then.
        """
        return self._call(method, [arguments] * len(self._workers), on_progress)

    def _call(
        self,
        method: str,
        arguments: Sequence[Mapping[str, Any]],
        on_progress: ProgressCallback | None,
    ) -> Any:
        try:
            results = _PendingCall(self._workers, on_progress).run(method, arguments)
        except _RankFailed as failed:
            self.kill()
            raise self._failure(failed.rank, failed.failure) from failed.failure
        except BaseException:
            self.kill()
            raise
        return results[0]

    def _failure(self, rank: int, failure: WorkerFailure) -> WorkerFailure:
        """Return a rank's failure as the group's."""
        return WorkerFailure(
            failure.kind,
            f"rank {rank} of {len(self._workers)}: {failure.message}",
            frames=failure.frames,
            phase=failure.phase,
            raised_in=failure.raised_in,
        )

    def printed(self) -> str:
        """Return the last lines that rank 0 printed."""
        return self._workers[0].printed()

    def kill(self) -> None:
        """End every rank and everything they started, at once."""
        for worker in self._workers:
            worker.release()
        for worker in self._workers:
            worker.kill()

    def close(self) -> None:
        """Let every rank end by itself, then make sure of it."""
        for worker in self._workers:
            worker.shut_down()
        for worker in self._workers:
            worker.close()


class _RankFailed(Exception):
    """A call failed because this rank did."""

    def __init__(self, rank: int, failure: WorkerFailure) -> None:
        super().__init__(failure.message)
        self.rank, self.failure = rank, failure


class _PendingCall:
    """One call to all ranks, until each has answered or the cause of a failure is known.

    A rank whose connection to its peers broke is not the cause: another rank failed before it, and
    is waited for. Where none follows, the broken connection is the failure.
    """

    def __init__(self, workers: Sequence[Worker], on_progress: ProgressCallback | None) -> None:
        self._workers, self._on_progress = workers, on_progress
        self._results: dict[int, Any] = {}
        self._lost_peer: _RankFailed | None = None
        self._cause_until = 0.0

    def run(self, method: str, arguments: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Return the ranks' results in their order; raise `_RankFailed`."""
        for rank, worker in enumerate(self._workers):
            try:
                worker.begin(method, **arguments[rank])
            except WorkerFailure as failure:
                raise _RankFailed(rank, failure) from failure
        waiting = list(range(len(self._workers)))
        while waiting:
            self._wait(waiting)
            waiting = [rank for rank in waiting if not self._has_ended(rank)]
            if self._lost_peer is not None and time.monotonic() >= self._cause_until:
                break
        if self._lost_peer is not None:
            raise self._lost_peer
        return [self._results[rank] for rank in sorted(self._results)]

    def _wait(self, waiting: Sequence[int]) -> None:
        """Wait until one of the ranks has sent something, or may wait no longer."""
        poll = select.poll()
        for rank in waiting:
            descriptor = self._workers[rank].fileno()
            if descriptor < 0:
                return  # another thread ended this worker: receiving from it will say so
            poll.register(descriptor, select.POLLIN)
        seconds = min(self._workers[rank].seconds_left() for rank in waiting)
        if self._lost_peer is not None:
            seconds = min(seconds, self._cause_until - time.monotonic())
        poll.poll(max(0.0, seconds) * 1000)

    def _has_ended(self, rank: int) -> bool:
        """Take what a rank has sent; say whether its part of the call is over."""
        worker = self._workers[rank]
        progress = self._on_progress if rank == 0 else None
        try:
            answer = worker.poll(progress)
            if answer is None:
                return False
            self._results[rank] = worker.result_of(answer)
        except WorkerFailure as failure:
            failed = _RankFailed(rank, failure)
            if failure.kind is not FailureKind.LOST_PEER:
                raise failed from failure
            if self._lost_peer is None:
                self._lost_peer = failed
                self._cause_until = time.monotonic() + _CAUSE_WAIT_SECONDS
        return True


def _settings_of_rank(settings: WorkerSettings, rank: int, port: int) -> WorkerSettings:
    """Return how the worker of one rank is started; ranks on a CPU share it, else each has one."""
    place = RankPlace(
        rank=rank,
        local_rank=rank,
        world_size=settings.nproc,
        engine=settings.engine,
        address=_ADDRESS,
        port=port,
    )
    shared = settings.device == DeviceKind.CPU.framework_name
    return replace(
        settings,
        place=place,
        device=settings.device if shared else f"{settings.device}:{rank}",
        environment={**settings.environment, **rank_environment(place)},
    )


def _free_port() -> int:
    """Return a port that nothing listens on, as torchrun's --standalone does."""
    with socket.socket() as found:
        found.bind((_ADDRESS, 0))
        return int(found.getsockname()[1])
