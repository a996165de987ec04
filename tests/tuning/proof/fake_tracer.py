"""A tracer whose training is a formula, for the tests of the proof."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from autoprec.core.dtypes import Policy
from autoprec.core.measurement import Unit
from autoprec.core.numerics import proof_steps
from autoprec.core.numerics.judging import LONG_STEPS
from autoprec.core.numerics.reference_recipe import settings_of
from autoprec.core.numerics.traces import (
    ExponentHistogram,
    NoisyStep,
    SettingsComparison,
    SettingsPoint,
    StepComparison,
    Trajectory,
)
from autoprec.core.recipe import LossScale, Recipe
from autoprec.tuning.proof import recipe_proof as proving

BFLOAT16 = Recipe(Policy.MIXED_BFLOAT16, 8)
FLOAT16 = Recipe(Policy.MIXED_FLOAT16, 8, loss_scale=LossScale())
UNITS = (Unit("", "Net"), Unit("norm", "Norm"), Unit("one", "Linear", 0.5), Unit("two", "L", 0.5))


def flattens(step: int) -> float:
    """A loss that has fallen to a tenth of itself by step 7, and hardly falls from there on."""
    return 0.2 + 1.8 * 0.5**step


def falls(step: int) -> float:
    """A loss that falls as 1 / step, for ever."""
    return 2.0 / (1 + step)


class FakeTracer:
    """Losses by formula; a 16-bit recipe is off by `error` unless `culprits` are its islands.

    Its metric is then `worse` than float32's. Settings compute something else where all of
    `broken` are on.
    """

    def __init__(self, *, error: float = 0.0, step_error: float | None = 0.0, **known: Any) -> None:
        self.error, self.step_error = error, step_error
        self.culprits = frozenset(known.get("culprits", ("none such",)))
        self.largest, self.counts = known.get("largest", -2), known.get("counts", {})
        self.overflow, self.recovery = known.get("overflow", 99), known.get("recovery", 1)
        self.step_seconds = known.get("step_seconds", 0.001)
        self.raises: Exception | None = known.get("raises")
        self.reproducible = known.get("reproducible", True)
        self.metric: float | None = known.get("metric")
        self.worse = known.get("worse", 0.0)
        self.stalls_after = known.get("stalls_after", math.inf)
        self.curve = known.get("curve", flattens)
        self.late_error = known.get("late_error", 0.0)
        self.long_batch_error: float | None = known.get("long_batch_error")
        self.noise_size = known.get("noise_size", 1e-6)
        self.broken = frozenset(known.get("broken", ("none such",)))
        self.calls: list[str] = []
        self.steps = 0
        self.checkpoints: Sequence[int] = ()

    def _off(self, recipe: Recipe) -> bool:
        return recipe.policy.mixed and not self.culprits <= set(recipe.float32_modules)

    def _note(self, name: str, recipe: Recipe | None = None) -> None:
        self.calls.append(name)
        if recipe is not None and recipe.policy.mixed and self.raises is not None:
            raise self.raises

    def _run(
        self, error: float, steps: int, seconds: float | None = None, **kwargs: Any
    ) -> Trajectory:
        if seconds is not None:
            in_time = 1 + int(seconds / self.step_seconds)
            steps = min(steps, in_time, self.stalls_after)
        self.steps += steps
        return Trajectory(
            losses=tuple(self.curve(step) * (1 + error * step) for step in range(steps)),
            seconds=steps * self.step_seconds,
            reproducible=self.reproducible,
            **{"metric": self.metric, **kwargs},
        )

    def reference(
        self,
        *,
        batch_size,
        steps,
        checkpoints,
        accumulation_steps=1,
        seconds=None,
        stop_at_plateau=False,
        compared_batch=None,
    ):
        self._note(f"reference {batch_size}x{accumulation_steps}")
        if stop_at_plateau:
            losses = [self.curve(step) for step in range(steps)]
            steps = next(n for n in range(1, steps + 1) if proof_steps.has_ended(losses[:n], steps))
        run = self._run(0.0, steps, seconds)
        self.checkpoints = [step for step in checkpoints if step < len(run.losses)]
        self.steps += len(self.checkpoints)  # on another batch: how noisy gradients are
        return run

    def compare_steps(self, *, recipe):
        self._note("compare_steps", recipe)
        self.steps += len(self.checkpoints)
        error = self.step_error if self._off(recipe) else 0.0
        loss = None if error is None else 2.0 * (1 + error)
        points = [StepComparison(step, loss, 2.0, 0.01) for step in self.checkpoints]
        if self.long_batch_error is not None and self._off(recipe):
            loss = 2.0 * (1 + self.long_batch_error)
            points.insert(3, StepComparison(29, loss, 2.0, 0.01, batch="the largest batch"))
        return tuple(points)

    def compare_settings(self, *, recipe):
        self._note("compare_settings", recipe)
        self.steps += 2
        keys = {setting.key for setting in settings_of(recipe)}
        error = 0.4 if self.broken <= keys else 1e-7
        return SettingsComparison(
            points=(SettingsPoint(0, 2.0 * (1 + error), 2.0, error, error),),
            noise=(SettingsPoint(0, 2.0, 2.0, 1e-7, 1e-7),),
        )

    def noise(self, *, draws):
        self._note("noise")
        self.steps += draws * len(self.checkpoints)
        return tuple(
            NoisyStep(step, 2.0001, 2.0, 0.001)
            for step, _ in itertools.product(self.checkpoints, range(draws))
        )

    def trajectory(self, *, recipe, seed, steps, noisy=False, seconds=None):
        if steps == proving.PACE_STEPS:
            return self._run(0.0, steps)
        self._note(f"{'noisy' if noisy else recipe.policy.value} {seed}", recipe)
        skipped = ()
        if recipe.loss_scale is not None and recipe.loss_scale.initial > 2.0**self.overflow:
            skipped = (0, 1, 2)
        elif recipe.loss_scale is not None and recipe.loss_scale.growth_interval < steps:
            skipped = tuple(self._overflows(recipe.loss_scale, steps))
        error = self.noise_size if noisy else self.error if self._off(recipe) else 0.0
        if steps > LONG_STEPS and self._off(recipe):
            error = self.late_error
        metric = self.metric
        if metric is not None and self._off(recipe):
            metric -= self.worse
        return self._run(error, steps, seconds, seed=seed, skipped=skipped, metric=metric)

    def _overflows(self, scale, steps):
        """The steps that a scale which doubles after every good step throws away."""
        exponent = math.log2(scale.initial)
        for step in range(steps):
            if exponent > self.overflow:
                yield step
                exponent -= self.recovery
            else:
                exponent += 1

    def backward_exponents(self, *, recipe, batches):
        self._note("exponents", recipe)
        return ExponentHistogram(self.largest, -20, self.counts, batches)

    def unit_magnitudes(self, *, recipe):
        raise AssertionError("a proof does not ask for these")
