"""The simulated backend: the same seam as a real framework, answered from formulas."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import platform
import random
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stateless_precision import StatelessPrecision

from autoprec.backends.protocol import (
    DeviceMemory,
    ProgressCallback,
    Session,
    Surgeon,
    Task,
    Tracer,
)
from autoprec.core.device.facts import DeviceFacts
from autoprec.core.device.observation import DeviceKind, Observation
from autoprec.core.dtypes import Policy
from autoprec.core.measurement import Dimension, Measurement, OperatorTime, TaskFacts, Unit
from autoprec.core.numerics import proof_steps
from autoprec.core.numerics.reference_recipe import settings_in_float32
from autoprec.core.numerics.traces import (
    ExponentHistogram,
    NoisyStep,
    SettingsComparison,
    SettingsPoint,
    StepComparison,
    Trajectory,
    UnitTrace,
)
from autoprec.core.ratio import Ratio
from autoprec.core.recipe import Recipe
from autoprec.core.speed.timing_budget import TimingBudget, summarize, timing_may_stop
from autoprec.errors import TaskError
from simulated.capabilities import CAPABILITIES
from simulated.model import SimulatedModel

#: Counts the sessions of this process, so that each has random numbers of its own.
_SESSION_NUMBERS = itertools.count()

_RELATIVE_ROUNDING = {Policy.FLOAT32: 0.0, Policy.TF32: 2e-4}


class SimulatedBackend:
    """See `autoprec.backends.protocol.Backend`."""

    name = "simulated"
    capabilities = CAPABILITIES

    def versions(self) -> Mapping[str, str]:
        """Return a version of its own, so that profiles can be told apart."""
        return {"python": platform.python_version(), "simulated": "1.0"}

    def devices(self) -> Iterable[str]:
        """Return the CPU, which is all it needs."""
        return ["cpu"]

    def trains_on(self) -> Iterable[DeviceKind]:
        """Return every kind: it only pretends."""
        return tuple(DeviceKind)

    def built_for(self) -> Iterable[DeviceKind]:
        """Return none: it has no use for an accelerator."""
        return ()

    def observe(self, device: str) -> Observation | None:
        """Return nothing: there is no device."""
        return None

    def memory(self, device: str) -> DeviceMemory | None:
        """Return nothing: other processes' memory is not simulated."""
        return None

    def missing_kernels(self, device: str) -> str:
        """Say that nothing is missing."""
        return ""

    def device_of(self, model: object) -> str:
        """Return the CPU, where everything simulated is."""
        return "cpu"

    def describe(
        self, task: Task, *, device: str, seed: int, batch_size: int, report: ProgressCallback
    ) -> TaskFacts:
        """See `Backend.describe`."""
        model = _model(task)
        report("describe", 0)
        samples = min(batch_size, model.samples or batch_size)
        return TaskFacts(
            framework=self.name,
            software=dict(self.versions()),
            nominal=batch_size,
            samples=samples,
            parameters=1_000_000,
            parameter_bytes=4_000_000,
            batch_size=task.batch_size,
            convolutions=model.convolutions,
            splittable=model.splittable,
            split_reason="" if model.splittable else "simulated BatchNorm",
            flops_per_sample=None,
            step_seconds=model.step_seconds("float32", samples, "contiguous", False),
            has_evaluate=task.evaluate is not None,
            dimensions=tuple(
                Dimension(unit, "Linear", "out_features", 100) for unit in model.units
            ),
            units=tuple(Unit(unit, "Linear", 1 / len(model.units)) for unit in model.units),
        )

    def open(
        self, task: Task, recipe: Recipe, *, device: str, seed: int, report: ProgressCallback
    ) -> Session:
        """See `Backend.open`."""
        return SimulatedSession(_model(task), recipe, seed, report)

    def tracer(self, task: Task, *, device: str, seed: int, report: ProgressCallback) -> Tracer:
        """See `Backend.tracer`."""
        return SimulatedTracer(_model(task), report)

    def surgeon(self) -> Surgeon:
        """See `Backend.surgeon`."""
        return SimulatedSurgeon()


def _model(task: Task) -> SimulatedModel:
    model = task.build_model()
    if not isinstance(model, SimulatedModel):
        raise TaskError(f"{task.name}: build_model returned {type(model).__name__}")
    return model


def _randomness(*parts: object) -> random.Random:
    text = "|".join(str(part) for part in parts)
    return random.Random(int(hashlib.sha256(text.encode()).hexdigest()[:16], 16))


class SimulatedSession:
    """Steps that take what the formulas say."""

    def __init__(
        self, model: SimulatedModel, recipe: Recipe, seed: int, report: ProgressCallback
    ) -> None:
        self._model, self._recipe, self._report = model, recipe, report
        self._random = _randomness(recipe.key(), seed, next(_SESSION_NUMBERS))
        report("build", 0)
        if recipe.policy.value in model.unsupported:
            raise RuntimeError("could not create a primitive descriptor")
        self._misbehave(recipe.batch_size)
        if model.peak_bytes(recipe.batch_size) > model.capacity_bytes:
            raise MemoryError(f"simulated: batch {recipe.batch_size} does not fit")
        self._held = _take(model.peak_bytes(recipe.batch_size)) if model.allocate_memory else None

    def _misbehave(self, batch: int) -> None:
        model = self._model
        if model.crash_at_batch is not None and batch >= model.crash_at_batch:
            os.kill(os.getpid(), signal.SIGSEGV)
        if model.exit_at_batch is not None and batch >= model.exit_at_batch:
            os._exit(7)
        if model.hang_at_batch is not None and batch >= model.hang_at_batch:
            time.sleep(3600)

    def operator_times(self) -> tuple[OperatorTime, ...]:
        """See `ProfiledSession.operator_times`."""
        own = self._recipe.policy.compute_dtype.value
        return OperatorTime("simulated::mm", own, 0.75), OperatorTime("log", "float32", 0.25)

    def time_steps(self, budget: TimingBudget) -> Measurement:
        """See `Session.time_steps`."""
        recipe = self._recipe
        base = recipe.accumulation_steps * self._model.step_seconds(
            recipe.policy.value, recipe.batch_size, recipe.memory_format, recipe.compile
        )
        base *= 1.0 + 0.05 * len(recipe.float32_modules)
        reduction = self._model.reduction(recipe)
        base += reduction
        if self._model.drift:
            base *= math.exp(self._random.gauss(0.0, self._model.drift))
        times: list[float] = []
        while not timing_may_stop(times, budget, sum(times)):
            times.append(base * math.exp(self._random.gauss(0.0, self._model.noise)))
            if self._model.sleep_seconds:  # even a sleep of nothing takes some time
                time.sleep(self._model.sleep_seconds)
            if len(times) == self._model.hang_after_steps:
                time.sleep(3600)
            self._report("steps", len(times))
        summary = summarize(times)
        samples = min(recipe.batch_size, self._model.samples or recipe.batch_size)
        return Measurement(
            step_seconds=summary.median,
            low=summary.low,
            high=summary.high,
            steps=summary.steps,
            samples_per_step=samples * recipe.accumulation_steps * recipe.world_size,
            peak_memory_bytes=self._model.peak_bytes(recipe.batch_size),
            exposed_communication=_exposed(reduction / base) if recipe.distributed else None,
        )

    def close(self) -> None:
        """Free what was really allocated."""
        self._held = None


def _exposed(share: float) -> Ratio:
    """Return a share as if it had been measured in a few rounds."""
    return Ratio(share, 0.9 * share, min(1.0, 1.1 * share), 6)


def _take(count: int) -> list[bytearray]:
    """Allocate `count` bytes and write to every page."""
    block = 2**24
    held = []
    for _ in range(-(-count // block)):
        held.append(bytearray(block))
        held[-1][::4096] = b"x" * (block // 4096)
    return held


class SimulatedTracer:
    """Losses that fall, and fall worse where the model says that a policy breaks it."""

    def __init__(self, model: SimulatedModel, report: ProgressCallback) -> None:
        self._model, self._report = model, report
        self._checkpoints: tuple[int, ...] = ()
        self._noise_share: float | None = None

    def reference(
        self,
        *,
        batch_size: int,
        steps: int,
        checkpoints: Sequence[int],
        accumulation_steps: int = 1,
        seconds: float | None = None,
        stop_at_plateau: bool = False,
        compared_batch: int | None = None,
    ) -> Trajectory:
        """See `Tracer.reference`."""
        losses = self._losses(0, steps, 1.0)
        noise = self._model.gradient_noise
        self._noise_share = None if noise is None else noise / (noise + batch_size)
        made = range(1, steps + 1)
        if stop_at_plateau:
            steps = next(n for n in made if proof_steps.has_ended(losses[:n], steps))
        self._checkpoints = tuple(step for step in checkpoints if step < steps)
        return Trajectory(losses[:steps], seed=0)

    def compare_steps(self, *, recipe: Recipe) -> tuple[StepComparison, ...]:
        """See `Tracer.compare_steps`."""
        self._report("trace", 0)
        rounding = _RELATIVE_ROUNDING.get(recipe.policy, 2e-3)
        if self._fails(recipe, self._model.nonfinite):
            return tuple(StepComparison(step, None, 1.0, None) for step in self._checkpoints)
        factor = 1.5 if self._breaks(recipe) else 1.0 + rounding
        error = 0.9 if self._breaks(recipe) else 5 * rounding
        share = self._noise_share
        losses = [(step, self._loss(0, step)) for step in self._checkpoints]
        return tuple(
            StepComparison(step, factor * loss, loss, error, noise_share=share)
            for step, loss in losses
        )

    def compare_settings(self, *, recipe: Recipe) -> SettingsComparison:
        """See `Tracer.compare_settings`."""
        self._report("trace", 2)
        settings = settings_in_float32(recipe)
        laid_out = settings.memory_format == "channels_last" and self._model.layout_breaks
        error = 0.9 if laid_out or self._breaks(settings) else 1e-7
        loss = self._loss(0, 0)
        return SettingsComparison(
            points=(SettingsPoint(0, loss * (1.0 + error), loss, error, error),),
            noise=(SettingsPoint(0, loss, loss, 1e-7, 1e-7),),
            weights_error=error,
            weights_noise=(1e-7,),
            updates=1,
        )

    def noise(self, *, draws: int) -> tuple[NoisyStep, ...]:
        """See `Tracer.noise`."""
        return tuple(
            NoisyStep(step, self._loss(0, step) * (1 + 1e-3), self._loss(0, step))
            for step in self._checkpoints
            for _ in range(draws)
        )

    def trajectory(
        self,
        *,
        recipe: Recipe,
        seed: int,
        steps: int,
        noisy: bool = False,
        seconds: float | None = None,
    ) -> Trajectory:
        """See `Tracer.trajectory`."""
        self._report("trace", 1)
        if self._fails(recipe, self._model.nonfinite):
            return Trajectory((None,) * steps, seed=seed)
        factor = 1.5 if self._breaks(recipe) else 1.0
        return Trajectory(self._losses(seed, steps, factor), seed=seed)

    def backward_exponents(self, *, recipe: Recipe, batches: int) -> ExponentHistogram:
        """See `Tracer.backward_exponents`."""
        counts = {str(e): 10.0 for e in range(-18, -1)}
        return ExponentHistogram(largest=-2, smallest=-18, counts=counts, batches=batches)

    def unit_magnitudes(self, *, recipe: Recipe) -> tuple[UnitTrace, ...]:
        """See `Tracer.unit_magnitudes`."""
        return tuple(UnitTrace(unit, 3, -2, 0.0) for unit in self._model.units)

    def _breaks(self, recipe: Recipe) -> bool:
        compiler = recipe.compile and self._model.compiler_breaks
        rounded = recipe.distributed is not None and recipe.distributed.rounds_gradients
        reduction = rounded and self._model.reduction_breaks
        return compiler or reduction or self._fails(recipe, self._model.broken)

    def _fails(self, recipe: Recipe, policies: tuple[str, ...]) -> bool:
        is_protected = (
            bool(self._model.sensitive_module)
            and self._model.sensitive_module in recipe.float32_modules
        )
        return recipe.policy.value in policies and not is_protected

    def _loss(self, seed: int, step: int) -> float:
        return 0.2 + 2.0 * math.exp(-step / 20) * (1 + 0.01 * seed)

    def _losses(self, seed: int, steps: int, factor: float) -> tuple[float, ...]:
        return tuple(self._loss(seed, step) * factor ** (step / steps) for step in range(steps))


class SimulatedSurgeon:
    """Applies a recipe to nothing."""

    def apply(
        self,
        recipe: Recipe,
        *,
        model: Any,
        optimizers: Sequence[Any],
        device: str,
        facts: DeviceFacts | None = None,
    ) -> StatelessPrecision:
        """See `Surgeon.apply`."""
        return StatelessPrecision(recipe)

    def leave_unchanged(
        self, recipe: Recipe, *, model: Any, optimizers: Sequence[Any], device: str, undo: bool
    ) -> StatelessPrecision:
        """See `Surgeon.leave_unchanged`."""
        return StatelessPrecision(recipe)
