"""Compares recipes with float32 on one task; see `autoprec.backends.protocol.Tracer`.

Everything compared starts from the same weights, sees the same batches and draws the same random
numbers (dropout). What a framework does for it, `TraceFramework` says. Only scalars and histograms
leave.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autoprec.backends.protocol import ProgressCallback
from autoprec.backends.shared.buffer_updates import SCALE, StepBuffers
from autoprec.backends.shared.checkpoint import Checkpoint, affordable_steps
from autoprec.backends.shared.gradient_exponents import ExponentCounts, in_bfloat16
from autoprec.backends.shared.ranks import ALONE, Ranks
from autoprec.backends.shared.repeatable_batches import BatchStream
from autoprec.backends.shared.settings_comparison import compare_settings
from autoprec.backends.shared.trace_framework import (
    Float16Magnitudes,
    StepAnswer,
    TraceFramework,
    Trainee,
)
from autoprec.backends.shared.trajectory_clock import StepClock
from autoprec.core.numerics import proof_steps
from autoprec.core.numerics.noise_scale import noise_share
from autoprec.core.numerics.traces import (
    ExponentHistogram,
    NoisyStep,
    SettingsComparison,
    StepComparison,
    Trajectory,
    UnitTrace,
)
from autoprec.core.recipe import Recipe
from autoprec.errors import UsageError

__all__ = ["ComparisonTracer", "Float16Magnitudes", "TraceFramework", "Trainee", "batch_seed"]


@dataclass
class _Run:
    """What a trajectory records."""

    losses: list[float | None] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    metric: float | None = None

    def is_over(self, steps: int, *, at_plateau: bool) -> bool:
        """Say whether a run of `steps` has ended, as with the first loss that is not finite."""
        settled = at_plateau and proof_steps.has_ended(self.losses, steps)
        return settled or None in self.losses or len(self.losses) >= steps


class ComparisonTracer:
    """A `Tracer`: compares recipes with float32, and measures a backward pass's magnitudes.

    Of several `ranks` that train together each has one, and calls it as the others do. The
    magnitudes are each rank's own: its model is not shared then.
    """

    def __init__(
        self,
        framework: TraceFramework,
        *,
        on_cpu: bool,
        report: ProgressCallback,
        ranks: Ranks = ALONE,
    ) -> None:
        self._framework, self._on_cpu, self._report = framework, on_cpu, report
        self._ranks = ranks
        self._streams: dict[tuple[int, int], BatchStream] = {}
        self._checkpoints: list[Checkpoint] = []
        self._batch_size = self._compared = 0

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
        """Train in float32 with seed 0; see `Tracer.reference`."""
        self._checkpoints, self._batch_size = [], batch_size
        self._compared = batch_size if compared_batch is None else compared_batch
        self._forget_batches_but(batch_size, self._compared)
        recipe = self._ranks.shared(
            Recipe(batch_size=batch_size, accumulation_steps=accumulation_steps)
        )
        clock = self._clock(seconds)
        keep = frozenset(checkpoints)
        return self._train(
            recipe, 0, steps, clock, reference=True, keep=keep, stop_at_plateau=stop_at_plateau
        )

    def compare_steps(self, *, recipe: Recipe) -> tuple[StepComparison, ...]:
        """Compute loss and gradient at every checkpoint; see `Tracer.compare_steps`."""
        self._require_checkpoints()
        points = []
        alike = self._ranks.shared(replace(recipe, accumulation_steps=1))
        with self._trainee(alike, 0) as trainee:
            for kept in self._checkpoints:
                self._report("compare_steps", kept.step)
                trainee.put_back(kept.state)
                loss, gradient, float16 = trainee.loss_and_gradient_watched(
                    kept.batch, self._seed(kept.step, 0)
                )
                left = StepBuffers.left_by(trainee, kept.state)
                buffers = self._with_scaled_step(trainee, kept, left)
                if kept.loss is not None and kept.gradient is not None:
                    point = StepComparison(
                        kept.step,
                        _finite(loss),
                        kept.loss,
                        self._framework.gradient_error(gradient, kept.gradient),
                        largest=float16.forward,
                        overflowed=float16.overflowed,
                        gradient_seen=bool(gradient),
                        backward=float16.backward,
                        buffers=buffers.compared_with(kept.buffers, alike.policy.compute_dtype),
                        noise_share=kept.noise_share,
                        evaluated=kept.is_evaluated,
                        evaluation_error=kept.evaluation_error(trainee, self._framework),
                        batch=kept.name,
                    )
                    later = self._later_losses(trainee, kept)
                    points.append(point.with_mean_losses(later, kept.later_losses))
        return tuple(points)

    def noise(self, *, draws: int) -> tuple[NoisyStep, ...]:
        """Do the same in float32 with noisy weights, `draws` times; see `Tracer.noise`."""
        self._require_checkpoints()
        points = []
        with self._trainee(self._float32(), 0, reference=True) as trainee:
            for kept, draw in itertools.product(self._checkpoints, range(draws)):
                self._report("noise", kept.step)
                trainee.put_back(kept.state)
                trainee.add_noise(draw)
                loss, gradient = trainee.loss_and_gradient(kept.batch, self._seed(kept.step, 0))
                if kept.loss is not None and kept.gradient is not None:
                    error = self._framework.gradient_error(gradient, kept.gradient)
                    moved = StepBuffers.left_by(trainee, kept.state).compared_with(kept.buffers)
                    evaluated = kept.evaluation_error(trainee, self._framework, draw)
                    points.append(
                        NoisyStep(
                            kept.step, _finite(loss), kept.loss, error, moved, evaluated, kept.name
                        )
                    )
        return tuple(points)

    def compare_settings(self, *, recipe: Recipe) -> SettingsComparison:
        """Compare a recipe's settings in float32 with plain float32; see the Tracer protocol."""
        return compare_settings(
            self._framework,
            self._ranks.shared(recipe),
            trainee=self._trainee,
            batch=lambda size, index: self._stream(size, 0).batch(index),
            seed=lambda step: self._seed(step, 0),
            agree=self._ranks.agree,
            report=self._report,
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
        """Train under `recipe` from the initial weights; see `Tracer.trajectory`."""
        recipe, clock = self._ranks.shared(recipe), self._clock(seconds)
        return self._train(recipe, seed, steps, clock, noisy=noisy)

    def backward_exponents(self, *, recipe: Recipe, batches: int) -> ExponentHistogram:
        """Measure the backward pass under bfloat16 at loss scale 1, at every kept state in turn."""
        counts = ExponentCounts()
        with self._trainee(in_bfloat16(recipe), 0) as trainee:
            stream = self._stream(recipe.batch_size, 0)
            states = [trainee.take_state()]
            if self._batch_size == recipe.batch_size:
                states += [kept.state for kept in self._checkpoints if kept.step > 0]
            for index in range(batches):
                self._report("exponents", index)
                trainee.put_back(states[index % len(states)])
                seed = self._seed(index, 0)
                self._framework.count_exponents(counts, trainee, stream.batch(index), seed)
        return counts.histogram()

    def unit_magnitudes(self, *, recipe: Recipe) -> tuple[UnitTrace, ...]:
        """Measure each unit's largest magnitudes forward and backward, and its underflow."""
        scale = recipe.loss_scale.initial if recipe.loss_scale is not None else 1.0
        with self._trainee(in_bfloat16(recipe), 0) as trainee:
            batch = self._stream(recipe.batch_size, 0).batch(0)
            return self._framework.unit_magnitudes(trainee, batch, self._seed(0, 0), scale)

    def _train(
        self,
        recipe: Recipe,
        seed: int,
        steps: int,
        clock: StepClock,
        *,
        reference: bool = False,
        noisy: bool = False,
        keep: frozenset[int] = frozenset(),
        stop_at_plateau: bool = False,
    ) -> Trajectory:
        run = _Run()
        with self._trainee(recipe, seed, reference=reference) as trainee:
            stream = self._stream(recipe.batch_size, seed)
            keep = affordable_steps(keep, trainee.state_bytes())
            if noisy:
                trainee.add_noise(seed)
            while clock.tick() and not run.is_over(steps, at_plateau=stop_at_plateau):
                step = len(run.losses)
                self._report("trajectory", step)
                batches = self._micro_batches(stream, recipe.accumulation_steps, seed, step)
                if step in keep:
                    loss, skipped = self._checkpoint_step(trainee, recipe, step, batches)
                else:
                    loss, skipped = trainee.train_step(batches)
                run.losses.append(_finite(loss))
                if skipped:
                    run.skipped.append(step)
                if recipe.policy.needs_loss_scale:
                    run.scales.append(trainee.scale)
            if self._framework.has_evaluate and None not in run.losses:
                self._report("evaluate", 0)
                run.metric = _finite(trainee.evaluate())
            if reference and run.is_over(steps, at_plateau=stop_at_plateau):
                self._complete_answers(trainee)
        return Trajectory(
            losses=tuple(run.losses),
            skipped=tuple(run.skipped),
            scales=tuple(run.scales),
            seed=seed,
            metric=run.metric,
            seconds=clock.elapsed,
            step_seconds=clock.step_seconds,
            reproducible=not self._ranks.agree(not stream.reproducible),
        )

    def _checkpoint_step(
        self, trainee: Trainee, recipe: Recipe, step: int, batches: Iterator[tuple[Any, int]]
    ) -> tuple[float, bool]:
        """Train one step of float32; keep the state before it, and its answer where it shows it.

        Compared is the step's own first batch, or one of another size.
        """
        if self._compared == recipe.batch_size:
            batch = self._stream(recipe.batch_size, 0).batch(
                step * recipe.accumulation_steps, pin=True
            )
        else:
            batch = self._stream(self._compared, 0).batch(len(self._checkpoints), pin=True)
        index = step * recipe.accumulation_steps
        seed = self._seed(step, 0)
        kept = Checkpoint(step, trainee.take_state(), batch, seed, index)
        self._checkpoints.append(kept)
        if self._compared != recipe.batch_size:
            return trainee.train_step(batches)
        answer = StepAnswer()
        trained = trainee.train_step(batches, answer)
        if answer.known:
            kept.loss, kept.gradient = _finite(answer.loss), answer.gradient
            kept.buffers = StepBuffers.left_by(trainee, kept.state, after=answer.buffers)
        return trained

    def _complete_answers(self, trainee: Trainee) -> None:
        """Compute what float32's training did not show of its answers at the checkpoints."""
        self._add_other_batches()
        for kept in self._checkpoints:
            if kept.gradient is None:
                trainee.put_back(kept.state)
                seed = self._seed(kept.step, 0)
                loss, kept.gradient = trainee.loss_and_gradient(kept.batch, seed)
                kept.loss = _finite(loss)
                kept.buffers = StepBuffers.left_by(trainee, kept.state)
            kept.buffers = self._with_scaled_step(trainee, kept, kept.buffers)
            kept.later_losses = self._later_losses(trainee, kept)
            kept.noise_share = None if kept.name else self._noise_share(trainee, kept)
            if kept.may_be_last(self._checkpoints[-1].step):
                kept.evaluate(trainee, self._stream(self._compared, 0).largest())

    def _add_other_batches(self) -> None:
        """Have batches of other sizes compared at the weights of the last of the first steps."""
        early = [kept for kept in self._checkpoints if kept.step < proof_steps.SHORT_STEPS]
        if early:
            place, at = len(early) - 1, early[-1]
            found = self._stream(self._compared, 0).other_sizes(self._ranks.agree)
            self._checkpoints[place:place] = [
                Checkpoint(at.step, at.state, batch, at.seed, at.index, name=name)
                for name, batch in found
            ]

    def _require_checkpoints(self) -> None:
        if not self._checkpoints:
            raise UsageError("reference() must run, with checkpoints, before it can be compared")

    def _with_scaled_step(
        self, trainee: Trainee, kept: Checkpoint, buffers: StepBuffers
    ) -> StepBuffers:
        """Return the buffers, at the last checkpoint with what a step makes of other values."""
        changed = buffers.changed if kept is self._checkpoints[-1] else ()
        if not self._ranks.agree(float(bool(changed))):
            return buffers
        trainee.put_back(trainee.scale_buffers(kept.state, changed, SCALE))
        trainee.loss(kept.batch, self._seed(kept.step, 0))
        return replace(buffers, from_scaled=trainee.buffers())

    def _later_losses(self, trainee: Trainee, kept: Checkpoint) -> tuple[float, ...]:
        """Return the losses of further batches at a checkpoint's weights."""
        trainee.put_back(kept.state)
        count = proof_steps.averaged_batches(kept.step)
        held = list(self._stream(self._batch_size, 0).kept_batches(count))
        batches = held[: -int(self._ranks.agree(-len(held)))]  # as many as every rank holds
        return tuple(
            trainee.loss(batch, self._seed(kept.step, 1 + index))
            for index, batch in enumerate(batches)
        )

    def _noise_share(self, trainee: Trainee, kept: Checkpoint) -> float | None:
        """Return which share of a gradient at a checkpoint is noise, by that of another batch.

        Both are of batches that float32 trained on, which may be smaller than what is compared.
        """
        stream = self._stream(self._batch_size, 0)
        count = -int(self._ranks.agree(-stream.kept_count))  # as many as every rank holds
        own, other = kept.index % count, (kept.index + 1) % count
        if own == other:
            return None

        def gradient_of(index: int) -> Any:
            trainee.put_back(kept.state)
            return trainee.loss_and_gradient(stream.batch(index), self._seed(kept.step, 0))[1]

        alike = self._compared == self._batch_size
        first = kept.gradient if alike else gradient_of(own)
        second, error = gradient_of(other), self._framework.gradient_error
        return noise_share(error(second, first), error(first, second))

    def _float32(self) -> Recipe:
        return self._ranks.shared(Recipe(batch_size=self._batch_size))

    def _clock(self, seconds: float | None) -> StepClock:
        return StepClock(seconds, on_cpu=self._on_cpu, agree=self._ranks.agree)

    def _seed(self, step: int, index: int, seed: int = 0) -> int:
        """Return the seed of one of this rank's micro-batches: no other rank's has it."""
        return batch_seed(seed, step, self._ranks.global_index(index))

    def _micro_batches(
        self, stream: BatchStream, count: int, seed: int, step: int
    ) -> Iterator[tuple[Any, int]]:
        for index in range(count):
            yield stream.batch(step * count + index), self._seed(step, index, seed)

    @contextlib.contextmanager
    def _trainee(self, recipe: Recipe, seed: int, *, reference: bool = False) -> Iterator[Trainee]:
        with self._framework.on_device():
            batch = self._stream(recipe.batch_size, seed).batch(0)
            with self._framework.trainee(recipe, seed, batch, reference=reference) as trainee:
                yield trainee

    def _forget_batches_but(self, *sizes: int) -> None:
        """Free the memory of batches of other sizes."""
        for key in [key for key in self._streams if key[0] not in sizes]:
            self._streams.pop(key).close()

    def _stream(self, batch_size: int, seed: int) -> BatchStream:
        key = (batch_size, seed)
        if key not in self._streams:
            self._streams[key] = self._framework.stream(batch_size, seed)
        return self._streams[key]


def batch_seed(seed: int, step: int, index: int) -> int:
    """Return the seed of one micro-batch's random numbers: the same in all runs compared."""
    return (seed * 1_000_003 + step * 1_009 + index) % 2**31


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
