"""The toy framework behind autoprec's protocol."""

from __future__ import annotations

import platform
import resource
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stateless_precision import StatelessPrecision

from autoprec.backends.protocol import DeviceMemory, ProgressCallback, Session, Task
from autoprec.backends.shared.step_timing import time_steps
from autoprec.backends.shared.tracer import ComparisonTracer
from autoprec.core.device.facts import DeviceFacts
from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.core.measurement import Measurement, TaskFacts, Unit
from autoprec.core.recipe import Recipe
from autoprec.core.speed.timing_budget import TimingBudget
from toy.capabilities import CAPABILITIES
from toy.trace import ToyTrace, ToyTrainee


class ToyBackend:
    """See `autoprec.backends.protocol.Backend`."""

    name = "toy"
    capabilities = CAPABILITIES

    def versions(self) -> Mapping[str, str]:
        return {"python": platform.python_version(), "toy": "1.0"}

    def devices(self) -> Iterable[str]:
        return ["cpu"]

    def trains_on(self) -> Iterable[DeviceKind]:
        return (DeviceKind.CPU,)

    def built_for(self) -> Iterable[DeviceKind]:
        return ()

    def observe(self, device: str) -> Observation | None:
        return None

    def memory(self, device: str) -> DeviceMemory | None:
        return None

    def missing_kernels(self, device: str) -> str:
        return ""

    def device_of(self, model: object) -> str:
        return "cpu"

    def describe(
        self, task: Task, *, device: str, seed: int, batch_size: int, report: ProgressCallback
    ) -> TaskFacts:
        session = ToySession(task, Recipe(batch_size=batch_size), seed, report)
        return TaskFacts(
            framework=self.name,
            software=dict(self.versions()),
            nominal=batch_size,
            samples=batch_size,
            parameters=len(session.model.values),
            parameter_bytes=8 * len(session.model.values),
            batch_size=task.batch_size,
            step_seconds=session.time_updates(1)[0],
            units=(Unit("linear", "Linear", 1.0),),
        )

    def open(
        self, task: Task, recipe: Recipe, *, device: str, seed: int, report: ProgressCallback
    ) -> Session:
        return ToySession(task, recipe, seed, report)

    def tracer(
        self, task: Task, *, device: str, seed: int, report: ProgressCallback
    ) -> ComparisonTracer:
        return ComparisonTracer(ToyTrace(task), on_cpu=True, report=report)

    def surgeon(self) -> ToySurgeon:
        return ToySurgeon()


class ToySession:
    """See `autoprec.backends.protocol.Session`."""

    def __init__(self, task: Task, recipe: Recipe, seed: int, report: ProgressCallback) -> None:
        report("build", 0)
        self._trainee, self._recipe, self._report = ToyTrainee(task, recipe, seed), recipe, report
        self.model = self._trainee.model
        stream = ToyTrace(task).stream(recipe.batch_size, seed)
        self._batches = [(stream.batch(i), i) for i in range(recipe.accumulation_steps)]

    def time_updates(self, count: int) -> list[float]:
        seconds = []
        for _ in range(count):
            self._trainee.train_step(iter(self._batches))
            seconds.append(self.model.device_seconds(self._recipe.effective_batch))
        return seconds

    def time_steps(self, budget: TimingBudget) -> Measurement:
        return time_steps(self.time_updates, budget, self._report).measurement(
            samples_per_step=self._recipe.effective_batch,
            data_seconds=0.0,
            peak_memory_bytes=1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            build_seconds=0.0,
            finite=True,
            notes=(),
        )

    def close(self) -> None:
        self._batches.clear()


class ToySurgeon:
    """Sets the layer's dtype."""

    def apply(
        self,
        recipe: Recipe,
        *,
        model: Any,
        optimizers: Sequence[Any],
        device: str,
        facts: DeviceFacts | None = None,
    ) -> StatelessPrecision:
        model.dtype = str(recipe.policy.compute_dtype)
        return StatelessPrecision(recipe)

    def leave_unchanged(
        self, recipe: Recipe, *, model: Any, optimizers: Sequence[Any], device: str, undo: bool
    ) -> StatelessPrecision:
        return StatelessPrecision(recipe)
