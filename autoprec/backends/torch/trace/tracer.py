"""Records how a torch task trains numerically; see `autoprec.backends.protocol.Tracer`.

Everything compared starts from the same weights, sees the same batches and draws the same random
numbers (dropout). The reference is the user's own float32 loop; a recipe is applied by the same
surgeon that `apply_profile` uses. Only scalars and histograms leave.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autoprec.backends.protocol import ProgressCallback, Task
from autoprec.backends.shared.checkpoint_budget import affordable_steps
from autoprec.backends.shared.step_clock import StepClock
from autoprec.backends.torch.apply.process_settings import process_settings_restored
from autoprec.backends.torch.trace import magnitudes
from autoprec.backends.torch.trace.batch_stream import BatchStream
from autoprec.backends.torch.trace.model_state import (
    Snapshot,
    add_noise,
    gradient_error,
    gradients,
    restore_snapshot,
    size_in_bytes,
    take_snapshot,
)
from autoprec.backends.torch.trace.recipe_model import PlainFloat32, Trainee, apply_recipe
from autoprec.backends.torch.train.compiling import compiled_throughout
from autoprec.backends.torch.train.rng import rng_preserved
from autoprec.backends.torch.train.task_runner import (
    build_model,
    build_optimizer,
    materialize,
    move,
    training_modes_preserved,
)
from autoprec.core.dtypes import DType, Policy
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

_NOISE_SEED = 7919


@dataclass
class _Checkpoint:
    """The float32 run's state before one step, that step's first batch, and float32's answer."""

    step: int
    state: Snapshot
    batch: Any
    loss: float | None = None
    gradient: Mapping[str, torch.Tensor] | None = None
    later_losses: tuple[float, ...] = ()


class TorchTracer:
    """Compares recipes with float32, and measures the magnitudes of a backward pass."""

    def __init__(self, task: Task, *, device: str, seed: int, report: ProgressCallback) -> None:
        self._task, self._device, self._seed, self._report = task, device, seed, report
        self._streams: dict[tuple[int, int], BatchStream] = {}
        self._initial: dict[int, Snapshot] = {}
        self._checkpoints: list[_Checkpoint] = []
        self._batch_size = 0
        self._float32_answered = False

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
        self._checkpoints, self._batch_size, self._float32_answered = [], batch_size, False
        self._forget_batches_but(batch_size)
        recipe = Recipe(batch_size=batch_size, accumulation_steps=accumulation_steps)
        clock = self._clock(seconds)
        keep = frozenset(checkpoints)
        return self._train(
            recipe, 0, steps, clock, plain=True, keep=keep, stop_at_plateau=stop_at_plateau
        )

    def shadow(self, *, recipe: Recipe) -> tuple[StepComparison, ...]:
        """Compute loss and gradient twice at every checkpoint; see `Tracer.shadow`."""
        self._compute_float32_answers()
        points = []
        with self._trainee(replace(recipe, accumulation_steps=1), 0) as trainee:
            for kept in self._checkpoints:
                self._report("shadow", kept.step)
                restore_snapshot(trainee.model, kept.state)
                forth, back = _watch(recipe), _watch(recipe)
                loss, gradient = self._loss_and_gradient(trainee, kept, forth, back)
                if kept.loss is not None and kept.gradient is not None:
                    error = gradient_error(gradient, kept.gradient)
                    largest, overflowed = (None, False) if forth is None else forth.summary()
                    point = StepComparison(kept.step, loss, kept.loss, error, largest, overflowed)
                    most = None if back is None else back.summary()[0]
                    scaled = None if most is None else most / trainee.scale
                    point = replace(point, backward=scaled)
                    points.append(
                        point.with_mean_losses(self._later_losses(trainee, kept), kept.later_losses)
                    )
        return tuple(points)

    def noise(self, *, draws: int) -> tuple[NoisyStep, ...]:
        """Do the same in float32 with noisy weights, `draws` times; see `Tracer.noise`."""
        self._compute_float32_answers()
        points = []
        with self._trainee(self._float32(), 0, plain=True) as trainee:
            for draw, kept in itertools.product(range(draws), self._checkpoints):
                self._report("noise", kept.step)
                restore_snapshot(trainee.model, kept.state)
                add_noise(trainee.model, _NOISE_SEED + draw)
                loss, gradient = self._loss_and_gradient(trainee, kept)
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
        stream = self._stream(recipe.batch_size, 0)
        found = magnitudes.ExponentCounter()
        with self._trainee(_in_bfloat16(recipe), 0) as trainee:
            states = [take_snapshot(trainee.model)]
            if self._batch_size == recipe.batch_size:
                states += [kept.state for kept in self._checkpoints if kept.step > 0]
            for index in range(batches):
                self._report("exponents", index)
                state = states[index % len(states)]
                restore_snapshot(trainee.model, state)
                found.add(trainee, stream.batch(index), _seed_of(0, index, 0), state)
        return found.histogram()

    def unit_magnitudes(self, *, recipe: Recipe) -> tuple[UnitTrace, ...]:
        """Measure each unit's largest magnitudes forward and backward, and its underflow."""
        batch = self._stream(recipe.batch_size, 0).batch(0)
        scale = recipe.loss_scale.initial if recipe.loss_scale is not None else 1.0
        with self._trainee(_in_bfloat16(recipe), 0) as trainee:
            return magnitudes.unit_magnitudes(trainee, batch, _seed_of(0, 0, 0), scale)

    def _train(
        self,
        recipe: Recipe,
        seed: int,
        steps: int,
        clock: StepClock,
        *,
        plain: bool = False,
        noisy: bool = False,
        keep: frozenset[int] = frozenset(),
        stop_at_plateau: bool = False,
    ) -> Trajectory:
        losses: list[float | None] = []
        skipped: list[int] = []
        scales: list[float] = []
        stream = self._stream(recipe.batch_size, seed)
        with self._trainee(recipe, seed, plain=plain) as trainee:
            keep = affordable_steps(keep, size_in_bytes(trainee.model))
            if noisy:
                add_noise(trainee.model, _NOISE_SEED + seed)
            for step in range(steps):
                if not clock.tick() or (stop_at_plateau and proof_steps.has_ended(losses, steps)):
                    break
                self._report("trajectory", step)
                if step in keep:
                    batch = stream.batch(step * recipe.accumulation_steps, pin=True)
                    self._checkpoints.append(_Checkpoint(step, take_snapshot(trainee.model), batch))
                losses.append(self._step(trainee, stream, recipe.accumulation_steps, seed, step))
                if not trainee.changed:
                    skipped.append(step)
                if recipe.policy.needs_loss_scale:
                    scales.append(trainee.scale)
            else:
                clock.tick()
            metric = self._evaluate(trainee)
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

    def _step(
        self, trainee: Trainee, stream: BatchStream, micro: int, seed: int, step: int
    ) -> float | None:
        """Take one optimizer step; return its mean loss, None where that is not finite."""
        total = 0.0
        for index in range(micro):
            batch = stream.batch(step * micro + index)
            loss = trainee.loss(batch, _seed_of(seed, step, index))
            trainee.precision.backward(loss)
            total += float(loss.detach())
        trainee.changed = trainee.update()
        mean = total / micro
        return mean if math.isfinite(mean) else None

    def _evaluate(self, trainee: Trainee) -> float | None:
        if self._task.evaluate is None:
            return None
        self._report("evaluate", 0)
        with rng_preserved(), training_modes_preserved(trainee.model):
            value = float(self._task.evaluate(trainee.model))
        return value if math.isfinite(value) else None

    def _compute_float32_answers(self) -> None:
        """Compute float32's loss and gradient at every checkpoint, once."""
        if not self._checkpoints:
            raise UsageError("reference() must run, with checkpoints, before it can be compared")
        if self._float32_answered:
            return
        with self._trainee(self._float32(), 0, plain=True) as trainee:
            for kept in self._checkpoints:
                restore_snapshot(trainee.model, kept.state)
                kept.loss, kept.gradient = self._loss_and_gradient(trainee, kept)
                kept.later_losses = self._later_losses(trainee, kept)
        self._float32_answered = True

    def _loss_and_gradient(
        self,
        trainee: Trainee,
        kept: _Checkpoint,
        forth: magnitudes.LargestMagnitudes | None = None,
        back: magnitudes.LargestMagnitudes | None = None,
    ) -> tuple[float | None, Mapping[str, torch.Tensor]]:
        trainee.model.zero_grad(set_to_none=True)
        with contextlib.nullcontext() if forth is None else forth:
            loss = trainee.loss(kept.batch, _seed_of(0, kept.step, 0))
        with contextlib.nullcontext() if back is None else back:
            trainee.precision.backward(loss)
        found = gradients(trainee.model, trainee.scale)
        trainee.model.zero_grad(set_to_none=True)
        value = float(loss.detach())
        return (value if math.isfinite(value) else None), found

    def _later_losses(self, trainee: Trainee, kept: _Checkpoint) -> tuple[float, ...]:
        """Compute the losses of further batches at a checkpoint's weights."""
        restore_snapshot(trainee.model, kept.state)
        batches = self._stream(self._batch_size, 0).kept_batches(
            proof_steps.averaged_batches(kept.step)
        )
        return tuple(
            float(trainee.loss(batch, _seed_of(0, kept.step, 1 + index)).detach())
            for index, batch in enumerate(batches)
        )

    def _float32(self) -> Recipe:
        return Recipe(batch_size=self._batch_size)

    @contextlib.contextmanager
    def _trainee(self, recipe: Recipe, seed: int, *, plain: bool = False) -> Iterator[Trainee]:
        """Build a new model under `recipe`; `plain` is the user's own float32 loop."""
        batch = move(self._stream(recipe.batch_size, seed).batch(0), self._device)
        with process_settings_restored(), compiled_throughout(recipe):
            model = build_model(self._task, self._device, self._seed + seed)
            materialize(self._task, model, batch, self._seed + seed)
            if seed in self._initial:
                restore_snapshot(model, self._initial[seed])
            else:
                self._initial[seed] = take_snapshot(model)
            optimizer = build_optimizer(self._task, model)
            if plain:
                precision: Any = PlainFloat32(optimizer, recipe.accumulation_steps)
            else:
                precision = apply_recipe(recipe, model, optimizer, self._device)
            yield Trainee(self._task, model, optimizer, precision, self._device)

    def _clock(self, seconds: float | None) -> StepClock:
        return StepClock(seconds, here=self._device == "cpu")

    def _forget_batches_but(self, batch_size: int) -> None:
        """Free the memory of batches of other sizes."""
        for key in [key for key in self._streams if key[0] != batch_size]:
            self._streams.pop(key).close()

    def _stream(self, batch_size: int, seed: int) -> BatchStream:
        key = (batch_size, seed)
        if key not in self._streams:
            self._streams[key] = BatchStream(self._task, batch_size, self._seed + seed)
        return self._streams[key]


def _watch(recipe: Recipe) -> magnitudes.LargestMagnitudes | None:
    """Return what records a pass's float16 magnitudes; None if none, or if it is compiled."""
    if recipe.policy.compute_dtype is not DType.FLOAT16 or recipe.compile:
        return None
    return magnitudes.LargestMagnitudes(torch.float16)


def _seed_of(seed: int, step: int, index: int) -> int:
    """Return the seed of one micro-batch's random numbers, the same in all compared runs."""
    return (seed * 1_000_003 + step * 1_009 + index) % 2**31


def _in_bfloat16(recipe: Recipe) -> Recipe:
    """Replace float16 by bfloat16 in a recipe: the same tensors with float32's range."""
    return replace(
        recipe,
        policy=Policy.MIXED_BFLOAT16,
        loss_scale=None,
        compile=False,
        accumulation_steps=1,
    )
