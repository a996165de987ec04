"""What a worker can be asked to do: the methods, their arguments and their results.

The tuner calls these by name over the channel; arguments and results are core's dataclasses,
converted by the type hints here. In the worker the same class does the work with a real backend.
"""

from __future__ import annotations

import gc
import time
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from autoprec.backends import registry
from autoprec.backends.protocol import (
    Backend,
    DeviceMemory,
    ProfiledSession,
    ProgressCallback,
    RankPlace,
    RoundingBackend,
    Session,
    Task,
    Tracer,
)
from autoprec.backends.shared import worker_process
from autoprec.backends.shared.process_memory import return_freed_memory
from autoprec.core.device.observation import DeviceKind
from autoprec.core.measurement import Measurement, OperatorTime, TaskFacts
from autoprec.core.ratio import Ratio
from autoprec.core.recipe import Recipe
from autoprec.core.speed.noise import paired_ratio, seems_disturbed
from autoprec.core.speed.timing_budget import TimingBudget
from autoprec.errors import TaskError, UsageError
from autoprec.workers.captured_task import describe_captured, fingerprint_of, optimizer_of
from autoprec.workers.factory import load_source
from autoprec.workers.parked_script import ReachedCall, ServeHere, run_script
from autoprec.workers.read_files import ReadFiles
from autoprec.workers.task_source import TaskSource

#: What the task's tracer is asked for, which is told under the same names.
TRACER_METHODS = tuple(name for name in vars(Tracer) if not name.startswith("_"))


@dataclass(frozen=True)
class LoadedTask:
    """What the tuner learns when a worker has loaded the task.

    Of what was captured from a script: what was `found` and where, a `fingerprint` of it for the
    digest, and the seconds that the script ran before.
    """

    framework: str
    software: Mapping[str, str] = field(default_factory=dict)
    batch_size: int | None = None
    clip_grad_norm: float | None = None
    has_evaluate: bool = False
    memory: DeviceMemory | None = None
    usable: tuple[str, ...] = ()
    trains_on: tuple[DeviceKind, ...] = tuple(DeviceKind)
    built_for: tuple[DeviceKind, ...] = ()
    notes: tuple[str, ...] = ()
    found: str = ""
    fingerprint: str = ""
    start_seconds: float = 0.0


def _only_in_a_worker(work: Callable[[], Any]) -> NoReturn:
    raise UsageError("a script needs a process of its own, which ends inside it")


class Service:
    """Serves one task on one device with one framework.

    A script is served by `serve_here` in the frame of its own call that trains.
    """

    def __init__(self, report: ProgressCallback, serve_here: ServeHere = _only_in_a_worker) -> None:
        self._report, self._serve_here = report, serve_here
        self._task: Task | None = None
        self._backend: Backend | None = None
        self._device = "cpu"
        self._sessions: dict[str, Session] = {}
        self._tracers: dict[int, Tracer] = {}

    def load(
        self,
        *,
        source: TaskSource,
        device: str,
        checkpoint: str | None = None,
        place: RankPlace | None = None,
    ) -> LoadedTask:
        """Run the task file, or the script up to its training, and find the framework."""
        more: dict[str, Any] = {
            "checkpoint": None if checkpoint is None else Path(checkpoint),
            "place": place,
        }
        if source.plain:
            self._report("load", 0)
            return self._take(replace(load_source(source), **more), device)
        with ReadFiles(source) as files:
            if source.script:
                self._report("script", 0)
                run_script(
                    source,
                    self._serve_here,
                    lambda call: self._take(replace(call.task(), **more), device, call, files),
                )
            self._report("load", 0)
            began = time.monotonic()
            task = replace(load_source(source), **more)
            call = ReachedCall(source.name, "", time.monotonic() - began, lambda: task)
            return self._take(task, device, call, files)

    def _take(
        self,
        task: Task,
        device: str,
        call: ReachedCall | None = None,
        files: ReadFiles | None = None,
    ) -> LoadedTask:
        """Take the task to serve it, and say what the tuner learns of it.

        `files` are those that were read to make it.
        """
        if files is not None:
            files.end()
        read = "" if files is None else files.digest()
        self._report("build", 0)
        model = task.build_model()
        name = registry.owner(model)
        backend = registry.load(name)
        self._task, self._backend, self._device = task, backend, device
        usable = tuple(backend.devices())
        defines_loss = task.loss_fn is not None or task.training_step is not None
        if backend.capabilities.loss_in_task and not defines_loss:
            raise TaskError(
                f"{task.name} defines neither loss_fn nor training_step; expected "
                "loss_fn(outputs, targets) -> scalar, or training_step(model, batch) -> loss"
            )
        return LoadedTask(
            framework=name,
            software=dict(backend.versions()),
            batch_size=task.batch_size,
            clip_grad_norm=task.clip_grad_norm,
            has_evaluate=task.evaluate is not None,
            memory=backend.memory(device) if device.partition(":")[0] in usable else None,
            usable=usable,
            trains_on=tuple(backend.trains_on()),
            built_for=tuple(backend.built_for()),
            notes=worker_process.notes(),
            **({} if call is None else _what_was_found(call, task, model, read)),
        )

    def describe(self, *, batch_size: int, seed: int, seconds: float | None = None) -> TaskFacts:
        """Take one float32 step and say what the task is; after `seconds`, what must be known."""
        task, backend = self._loaded()
        task = replace(task, describing_seconds=seconds)
        return backend.describe(
            task, device=self._device, seed=seed, batch_size=batch_size, report=self._report
        )

    def open(self, *, name: str, recipe: Recipe, seed: int, surveyed: int | None = None) -> None:
        """Build the model by `recipe` and keep it under `name`, warm and ready.

        `surveyed` is what `describe` found: see `TaskFacts`.
        """
        task, backend = self._loaded()
        if surveyed is not None:
            task = replace(task, surveyed=surveyed)
        self.close(name=name)
        self._sessions[name] = backend.open(
            task, recipe, device=self._device, seed=seed, report=self._report
        )

    def time(self, *, name: str, budget: TimingBudget) -> Measurement:
        """Time the steps of an open session."""
        return self._sessions[name].time_steps(budget)

    def close(self, *, name: str) -> None:
        """Close a session, if it is open."""
        session = self._sessions.pop(name, None)
        if session is not None:
            session.close()

    def measure(
        self, *, recipe: Recipe, seed: int, budget: TimingBudget, surveyed: int | None = None
    ) -> Measurement:
        """Open, time and close: one trial.

        A timing that seems disturbed is repeated, and the second one counts: the faster of two
        would favour what is doubted.
        """
        try:
            self.open(name="trial", recipe=recipe, seed=seed, surveyed=surveyed)
            first = self.time(name="trial", budget=budget)
            if not seems_disturbed(first.step_seconds, budget.expected_seconds):
                return first
            again = self.time(name="trial", budget=budget)
            return replace(
                again, warmup_seconds=first.warmup_seconds, warmup_steps=first.warmup_steps
            )
        finally:
            self.close(name="trial")

    def operator_times(
        self, *, recipe: Recipe, seed: int, surveyed: int | None = None
    ) -> tuple[OperatorTime, ...]:
        """Profile one update under a recipe; () if the framework has no profiler."""
        try:
            self.open(name="profiled", recipe=recipe, seed=seed, surveyed=surveyed)
            session = self._sessions["profiled"]
            return session.operator_times() if isinstance(session, ProfiledSession) else ()
        finally:
            self.close(name="profiled")

    def rounding_gain(
        self,
        *,
        recipe: Recipe,
        seed: int,
        sizes: tuple[int, int],
        budget: TimingBudget,
        rounds: int,
        surveyed: int | None = None,
    ) -> Ratio | None:
        """Time a recipe as it is and with a vocabulary of the second size, in turns.

        Returns the rounded model's speed over the other's; None if the framework cannot round.
        """
        task, backend = self._loaded()
        if not isinstance(backend, RoundingBackend):
            return None
        rates: dict[str, list[float]] = {"as it is": [], "rounded": []}
        try:
            self.open(name="as it is", recipe=recipe, seed=seed, surveyed=surveyed)
            self._task = backend.with_rounded_vocabulary(task, *sizes)
            self.open(name="rounded", recipe=recipe, seed=seed, surveyed=surveyed)
            for _ in range(rounds):
                for name, found in rates.items():
                    found.append(self.time(name=name, budget=budget).samples_per_second)
        finally:
            self._task = task
            for name in rates:
                self.close(name=name)
        return paired_ratio(rates["rounded"], rates["as it is"])

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a method of the task's tracer."""
        if name not in TRACER_METHODS:
            raise AttributeError(name)
        method: Callable[..., Any] = getattr(self._tracer(), name)
        return method

    def discard_traces(self) -> None:
        """Free the memory of the tracer's snapshots."""
        self._tracers.clear()
        gc.collect()
        return_freed_memory()

    def _tracer(self) -> Tracer:
        task, backend = self._loaded()
        if 0 not in self._tracers:
            self._tracers[0] = backend.tracer(
                task, device=self._device, seed=0, report=self._report
            )
        return self._tracers[0]

    def _loaded(self) -> tuple[Task, Backend]:
        if self._task is None or self._backend is None:
            raise RuntimeError("load must be called first")
        return self._task, self._backend


def _what_was_found(call: ReachedCall, task: Task, model: Any, read: str) -> dict[str, Any]:
    optimizer = optimizer_of(task, model)
    return {
        "found": f"{call.said}, {describe_captured(task, optimizer)}",
        "fingerprint": fingerprint_of(task, model, optimizer, call.made_by + read),
        "start_seconds": call.seconds,
    }


@cache
def type_hints_of(method: str) -> dict[str, Any]:
    """Return the type hints of a method: its arguments by name, and "return"."""
    owner = Tracer if method in TRACER_METHODS else Service
    return typing.get_type_hints(getattr(owner, method))
