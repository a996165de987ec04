"""Records how a Keras task trains numerically; see `autoprec.backends.protocol.Tracer`.

Everything compared starts from the same weights and seeds and sees the same batches. The step is
the model's own train_step, compiled as the recipe says. Only scalars and histograms leave.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoprec.backends.keras.trace import magnitudes
from autoprec.backends.keras.trace.batch_stream import BatchStream
from autoprec.backends.keras.trace.trainee import Snapshot, Trainee, finite, gradient_error
from autoprec.backends.keras.train.task_runner import on_tensorflow, placed_on
from autoprec.backends.protocol import ProgressCallback, Task
from autoprec.backends.shared.checkpoint_budget import affordable
from autoprec.backends.shared.step_clock import StepClock
from autoprec.core.dtypes import DType
from autoprec.core.numerics import proof_steps
from autoprec.core.numerics.records import (
    ExponentHistogram,
    NoisyStep,
    StepComparison,
    Trajectory,
    UnitTrace,
)
from autoprec.core.recipe import Recipe
from autoprec.errors import UsageError


@dataclass
class _Checkpoint:
    """The float32 run's state before one step, that step's batch, and what float32 makes of it."""

    step: int
    state: Snapshot
    batch: Any
    loss: float | None = None
    gradient: Sequence[Any] | None = None
    further: tuple[float, ...] = ()


class KerasTracer:
    """Compares recipes with float32, and measures the magnitudes of a backward pass."""

    def __init__(self, task: Task, *, device: str, seed: int, report: ProgressCallback) -> None:
        self._task, self._device, self._seed, self._report = task, device, seed, report
        self._streams: dict[tuple[int, int], BatchStream] = {}
        self._checkpoints: list[_Checkpoint] = []
        self._float32: Trainee | None = None
        self._batch_size = 0

    def reference(
        self,
        *,
        batch_size: int,
        steps: int,
        checkpoints: Sequence[int],
        accumulation_steps: int = 1,
        seconds: float | None = None,
        stop_at_plateau: bool = False,
    ) -> Trajectory:
        """Train in float32 with seed 0; see `Tracer.reference`."""
        recipe = Recipe(batch_size=batch_size, accumulation_steps=accumulation_steps)
        self._forget_float32()
        self._checkpoints, self._batch_size = [], batch_size
        self._streams = {key: kept for key, kept in self._streams.items() if key[0] == batch_size}
        keep = frozenset(checkpoints)
        return self._train(
            recipe, 0, steps, self._clock(seconds), keep=keep, stop_at_plateau=stop_at_plateau
        )

    def shadow(self, *, recipe: Recipe) -> tuple[StepComparison, ...]:
        """Compute loss and gradient twice at every checkpoint; see `Tracer.shadow`."""
        with placed_on(self._device):
            self._know_reference()
            micro = replace(recipe, accumulation_steps=1)
            trainee = self._trainee(micro, self._checkpoints[0].batch)
            watch = _watch(recipe, trainee, self._checkpoints[0].batch)
            points = []
            for kept in self._checkpoints:
                self._report("shadow", kept.step)
                trainee.put_back(kept.state)
                seen = magnitudes.Float16() if watch is None else watch.read(kept.batch)
                loss, gradient = trainee.loss_and_gradient(kept.batch)
                if kept.loss is not None and kept.gradient is not None:
                    points.append(
                        StepComparison(
                            kept.step,
                            loss,
                            kept.loss,
                            gradient_error(gradient, kept.gradient),
                            largest=seen.forward,
                            overflowed=seen.overflowed,
                            gradient_seen=bool(gradient),
                            backward=seen.backward,
                        ).with_mean_losses(self._further(trainee, kept), kept.further)
                    )
            trainee.close()
        return tuple(points)

    def noise(self, *, draws: int) -> tuple[NoisyStep, ...]:
        """Do the same in float32 with noisy weights, `draws` times; see `Tracer.noise`."""
        points = []
        with placed_on(self._device):
            trainee = self._know_reference()
            for kept in self._checkpoints:
                for draw in range(draws):
                    self._report("noise", kept.step)
                    trainee.put_back(kept.state)
                    trainee.add_noise(draw)
                    loss, gradient = trainee.loss_and_gradient(kept.batch)
                    if kept.loss is not None and kept.gradient is not None:
                        error = gradient_error(gradient, kept.gradient)
                        points.append(NoisyStep(kept.step, loss, kept.loss, error))
        return tuple(points)

    def trajectory(
        self,
        *,
        recipe: Recipe,
        seed: int,
        steps: int,
        noisy: bool = False,
        seconds: float | None = None,
    ) -> Trajectory:
        """Train under `recipe` from the initial weights; see `Tracer.trajectory`."""
        return self._train(recipe, seed, steps, self._clock(seconds), noisy=noisy)

    def backward_exponents(self, *, recipe: Recipe, batches: int) -> ExponentHistogram:
        """Measure the backward pass under bfloat16 at loss scale 1, at every kept state in turn."""
        with placed_on(self._device):
            trainee, stream = self._in_bfloat16(recipe)
            states = [trainee.take()]
            if self._batch_size == recipe.batch_size:
                states += [kept.state for kept in self._checkpoints if kept.step > 0]
            found = magnitudes.Exponents()
            for index in range(batches):
                self._report("exponents", index)
                trainee.put_back(states[index % len(states)])
                found.add(trainee, stream.batch(index))
            trainee.close()
        return found.histogram()

    def unit_magnitudes(self, *, recipe: Recipe) -> tuple[UnitTrace, ...]:
        """Measure each unit's largest magnitudes forward and backward, and its underflow."""
        with placed_on(self._device):
            trainee, stream = self._in_bfloat16(recipe)
            scale = recipe.loss_scale.initial if recipe.loss_scale is not None else 1.0
            traces = magnitudes.by_unit(trainee, stream.batch(0), scale)
            trainee.close()
        return traces

    def _train(
        self,
        recipe: Recipe,
        seed: int,
        steps: int,
        clock: StepClock,
        noisy: bool = False,
        keep: frozenset[int] = frozenset(),
        stop_at_plateau: bool = False,
    ) -> Trajectory:
        losses: list[float | None] = []
        skipped: list[int] = []
        scales: list[float] = []
        micro = recipe.accumulation_steps
        with placed_on(self._device):
            stream = self._stream(recipe.batch_size, seed)
            trainee = self._trainee(recipe, stream.batch(0), seed)
            keep = affordable(keep, trainee.size_in_bytes())
            if noisy:
                trainee.add_noise(seed)
            for step in range(steps):
                if not clock.tick() or (stop_at_plateau and proof_steps.has_ended(losses, steps)):
                    break
                self._report("trajectory", step)
                pin = step in keep
                taken = [stream.batch(step * micro + index, pin=pin) for index in range(micro)]
                if pin:
                    self._checkpoints.append(_Checkpoint(step, trainee.take(), taken[0]))
                before = trainee.precision.skipped
                losses.append(trainee.step(taken))
                if trainee.precision.skipped > before:
                    skipped.append(step)
                if trainee.scaled is not None:
                    scales.append(trainee.precision.scale)
            else:
                clock.tick()
            metric = self._evaluate(trainee)
            trainee.close()
        return Trajectory(
            losses=tuple(losses),
            skipped=tuple(skipped),
            scales=tuple(scales),
            seed=seed,
            metric=metric,
            seconds=clock.elapsed,
            step_seconds=clock.step_seconds,
            reproducible=stream.reproducible,
        )

    def _evaluate(self, trainee: Trainee) -> float | None:
        if self._task.evaluate is None:
            return None
        self._report("evaluate", 0)
        return finite(float(self._task.evaluate(trainee.model)))

    def _know_reference(self) -> Trainee:
        """Build the float32 model, and compute its loss and gradient at every checkpoint."""
        if not self._checkpoints:
            raise UsageError("reference() must run, with checkpoints, before it can be compared")
        if self._float32 is None:
            recipe = Recipe(batch_size=self._batch_size)
            self._float32 = self._trainee(recipe, self._checkpoints[0].batch)
            for kept in self._checkpoints:
                self._float32.put_back(kept.state)
                kept.loss, kept.gradient = self._float32.loss_and_gradient(kept.batch)
                kept.further = self._further(self._float32, kept)
        return self._float32

    def _further(self, trainee: Trainee, kept: _Checkpoint) -> tuple[float, ...]:
        """Return the losses of further batches at a checkpoint's weights, already loaded."""
        batches = self._stream(self._batch_size, 0).held(proof_steps.averaged_batches(kept.step))
        losses = (trainee.loss_and_gradient(batch)[0] for batch in batches)
        return tuple(math.nan if loss is None else loss for loss in losses)

    def _forget_float32(self) -> None:
        """Give back the memory of the float32 model that checkpoints were compared with."""
        if self._float32 is not None:
            with placed_on(self._device):
                self._float32.close()
        self._float32 = None

    def _trainee(self, recipe: Recipe, batch: Any, seed: int = 0) -> Trainee:
        return Trainee(self._task, recipe, self._seed + seed, batch, self._device)

    def _in_bfloat16(self, recipe: Recipe) -> tuple[Trainee, BatchStream]:
        stream = self._stream(recipe.batch_size, 0)
        low = magnitudes.in_bfloat16(recipe)
        return self._trainee(low, stream.batch(0)), stream

    def _clock(self, seconds: float | None) -> StepClock:
        return StepClock(seconds, here=self._device == "cpu")

    def _stream(self, batch_size: int, seed: int) -> BatchStream:
        key = (batch_size, seed)
        if key not in self._streams:
            self._streams[key] = BatchStream(self._task, batch_size, self._seed + seed)
        return self._streams[key]


def _watch(recipe: Recipe, trainee: Trainee, batch: Any) -> magnitudes.Watch | None:
    """Return a reader of a step's float16 numbers, or None where graphs cannot be read."""
    float16 = recipe.policy.compute_dtype is DType.FLOAT16
    if not float16 or recipe.compile or not on_tensorflow():
        return None
    return magnitudes.Watch(trainee, batch)
