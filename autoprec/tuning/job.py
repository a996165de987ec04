"""One tuning's work order: what every stage needs to know, none of which changes on the way."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from autoprec.backends.protocol import FREE_SHARE, DeviceMemory
from autoprec.core.device.facts import DeviceFacts, DeviceKind
from autoprec.core.device.placement import alone
from autoprec.core.dtypes import Policy
from autoprec.core.probe_result import Unusable
from autoprec.core.profile import CheckpointRecord
from autoprec.tuning.events import Listener, Note, Progress
from autoprec.tuning.options import Options
from autoprec.tuning.time_limit import Deadline
from autoprec.workers.client import Worker, WorkerSettings
from autoprec.workers.cpu_contention import ContentionMonitor
from autoprec.workers.memory_limit import memory_budget
from autoprec.workers.runner import Runner


@dataclass(frozen=True)
class Target:
    """Where a tuning runs: what is known of the device and the software before any work.

    `measure` times the device's matrix products. `unusable` are accelerators that
    would have been preferred and cannot be used.
    """

    facts: DeviceFacts
    software: Mapping[str, str]
    measure: Callable[[DeviceFacts], DeviceFacts]
    unusable: tuple[Unusable, ...] = ()


@dataclass(frozen=True)
class TuningJob:
    """The task, the place, the options, and how workers are started.

    `memory` is the accelerator's as the first worker finds it, `deadline` when all must have ended.
    """

    task: Path
    target: Target
    options: Options
    listener: Listener
    start: Callable[[WorkerSettings], Worker] = Worker
    memory: DeviceMemory | None = None
    deadline: Deadline = field(default_factory=Deadline)

    @cached_property
    def memory_bytes(self) -> int | None:
        """What a worker may use: main memory on a CPU, elsewhere what is free of the device's own.

        All of the device's where nobody tells what is free.
        """
        if self.options.memory_bytes is not None:
            return self.options.memory_bytes
        seen = self.target.facts.observation
        if self.on_cpu:
            return memory_budget(seen.memory_bytes)
        free = seen.memory_bytes if self.memory is None else self.memory.free
        return None if free is None else int(FREE_SHARE * free)

    @cached_property
    def checkpoint(self) -> CheckpointRecord | None:
        """The weights that training starts from, where they are not `build_model`'s own."""
        path = self.options.checkpoint
        if path is None:
            return None
        with path.open("rb") as file:
            return CheckpointRecord(path.name, hashlib.file_digest(file, "sha256").hexdigest())

    @cached_property
    def contention_monitor(self) -> ContentionMonitor:
        """Watches for other processes while something is measured."""
        return ContentionMonitor(lambda text: self.listener(Note(text, warning=True)))

    @property
    def on_cpu(self) -> bool:
        """Whether main memory is the device's memory."""
        return self.target.facts.kind is DeviceKind.CPU

    @property
    def float32_allowed(self) -> bool:
        """Whether float32 may be the answer."""
        return not self.options.policies or Policy.FLOAT32 in self.options.policies

    def settings(self) -> WorkerSettings:
        """How this work's workers are started."""
        placement = alone(self.target.facts.observation)
        return WorkerSettings(
            task=self.task,
            device=placement.device,
            checkpoint=self.options.checkpoint,
            memory_bytes=self.memory_bytes if self.on_cpu else None,
            environment=placement.environment,
        )

    def runner(self) -> Runner:
        """A runner with a worker of its own."""
        return Runner(self.settings(), self.on_progress, self.start)

    def on_progress(self, phase: str, step: int) -> None:
        """Tell the listener how far a worker is."""
        self.listener(Progress(phase, step))
