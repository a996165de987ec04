"""One tuning's job: what every stage needs to know, fixed before the first one starts."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from autoprec.backends.protocol import USABLE_FREE_MEMORY_SHARE, DeviceMemory
from autoprec.core.device.facts import DeviceFacts
from autoprec.core.device.observation import DeviceKind
from autoprec.core.device.placement import expose
from autoprec.core.device.probe_result import Unusable
from autoprec.core.dtypes import Policy
from autoprec.core.profile import CheckpointRecord
from autoprec.tuning.events import Listener, Note, Progress
from autoprec.tuning.options import Options
from autoprec.tuning.ranks import devices_of_ranks, rank_threads
from autoprec.tuning.time_limit import Deadline
from autoprec.workers.client import Worker, WorkerSettings
from autoprec.workers.cpu_contention import PATIENCE_SECONDS, ContentionMonitor
from autoprec.workers.memory_limit import free_main_memory, memory_budget
from autoprec.workers.rank_group import RankGroup, start_workers
from autoprec.workers.runner import Runner
from autoprec.workers.task_source import TaskSource


@dataclass(frozen=True)
class Target:
    """What a tuning is for: the device and the software, as known before anything is measured.

    `measure` times the device's matrix products with one of the frameworks given. `unusable` holds
    the accelerators that would have been preferred but cannot be used, `peers` the other devices
    here that are the same.
    """

    facts: DeviceFacts
    software: Mapping[str, str]
    measure: Callable[[DeviceFacts, Mapping[str, str]], DeviceFacts]
    unusable: tuple[Unusable, ...] = ()
    peers: tuple[DeviceFacts, ...] = ()


#: At most this share of the time limit is spent on what other processes disturb.
_PATIENCE_SHARE = 0.05


@dataclass(frozen=True)
class TuningJob:
    """The task, the target, the options, and how workers are started.

    `main_memory` is what was free before any worker took some, in bytes; `memory` is the
    accelerator's as the first worker finds it. By `deadline` the whole tuning must have ended.
    `surveyed` is what the task's description says of its batches.
    `start_ups` are the seconds that a script took to its training, in each worker so far.
    """

    task: TaskSource
    target: Target
    options: Options
    listener: Listener
    start: Callable[[WorkerSettings], Worker | RankGroup] = start_workers
    main_memory: int | None = field(default_factory=free_main_memory)
    memory: DeviceMemory | None = None
    deadline: Deadline = field(default_factory=Deadline)
    surveyed: int | None = None
    start_ups: list[float] = field(default_factory=list)

    @cached_property
    def memory_bytes(self) -> int | None:
        """Return a worker's memory limit in bytes: of main memory on a CPU, else of free memory.

        Ranks on a CPU have equal parts of it. Where the free memory is not known, it is taken of
        all the device's memory.
        """
        seen = self.target.facts.observation
        budget = self.options.memory_bytes
        if self.on_cpu:
            budget = (
                memory_budget(self.main_memory, seen.memory_bytes) if budget is None else budget
            )
            return None if budget is None else budget // self.options.nproc
        if budget is not None:
            return budget
        free = seen.memory_bytes if self.memory is None else self.memory.free
        return None if free is None else int(USABLE_FREE_MEMORY_SHARE * free)

    @cached_property
    def checkpoint(self) -> CheckpointRecord | None:
        """Return the record of the weights that training starts from; None: `build_model`'s own."""
        path = self.options.checkpoint
        if path is None:
            return None
        with path.open("rb") as file:
            return CheckpointRecord(path.name, hashlib.file_digest(file, "sha256").hexdigest())

    @cached_property
    def contention_monitor(self) -> ContentionMonitor:
        """Return what notices other processes, and on a CPU waits until they pause."""
        limit = _PATIENCE_SHARE * self.deadline.seconds
        patience = min(PATIENCE_SECONDS, limit) if self.on_cpu else 0.0
        return ContentionMonitor(lambda text: self.listener(Note(text, warning=True)), patience)

    @cached_property
    def devices(self) -> tuple[DeviceFacts, ...]:
        """Return the devices to train on, the target first; raise where there are too few."""
        return devices_of_ranks(self.target.facts, self.target.peers, self.options.nproc)

    @property
    def on_cpu(self) -> bool:
        """Say whether the device's memory is main memory."""
        return self.target.facts.kind is DeviceKind.CPU

    @property
    def float32_allowed(self) -> bool:
        """Say whether float32 may be chosen."""
        return not self.options.policies or Policy.FLOAT32 in self.options.policies

    def settings(self) -> WorkerSettings:
        """Return how this job's workers are started."""
        options, seen = self.options, self.target.facts.observation
        placement = expose([each.observation for each in self.devices])
        return WorkerSettings(
            task=self.task,
            device=placement.device,
            checkpoint=options.checkpoint,
            memory_bytes=self.memory_bytes if self.on_cpu else None,
            environment={
                **placement.environment,
                **rank_threads(seen, options.nproc, os.environ),
            },
            nproc=options.nproc,
            engine=options.engine,
            surveyed=self.surveyed,
        )

    def runner(self) -> Runner:
        """Return a runner with a worker of its own."""
        return Runner(self.settings(), self.on_progress, self.start, self.start_ups)

    def on_progress(self, phase: str, step: int) -> None:
        """Report a worker's progress to the listener."""
        self.listener(Progress(phase, step))
