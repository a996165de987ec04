"""The trials of a search, looked up by recipe."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autoprec.core.measurement import Measurement, TaskFacts
from autoprec.core.recipe import Recipe
from autoprec.core.speed.space import BATCH, Space, point_key
from autoprec.core.speed.trial_results import (
    Outcome,
    compile_seconds,
    fit_model,
    setup_seconds,
)
from autoprec.core.statistics import median

Measured = Mapping[str, tuple[Measurement, ...]]
"""Measurements of interleaved timing, one a round, by the recipe's key."""


@dataclass(frozen=True)
class Trials:
    """The trials of one task in its space, oldest first.

    `rehearsed` says that the device is only pretended, so that times mean nothing.
    """

    task: TaskFacts
    space: Space
    history: tuple[Outcome, ...]
    rehearsed: bool = False

    @property
    def framework(self) -> str:
        """Return the name of the task's framework."""
        return self.task.framework

    def outcome_of(self, recipe: Recipe) -> Outcome | None:
        """Return the trial of a recipe; None where islands were added to it afterwards."""
        point = self.space.point(recipe)
        if self.space.recipe(point).float32_modules != recipe.float32_modules:
            return None
        found = (each for each in self.history if point_key(each.point) == point_key(point))
        return next(found, None)

    def measurement_of(self, recipe: Recipe) -> Measurement | None:
        """Return what the search measured at a recipe's point, None where it did not."""
        point = dict(self.space.point(recipe))
        for outcome in self.history:
            if outcome.measurement is not None and dict(outcome.point) == point:
                return outcome.measurement
        return None

    def peak_memory_of(self, recipe: Recipe) -> int:
        """Return the peak memory of the trial most like a recipe, in bytes; 0 without trials."""
        point = dict(self.space.point(recipe))
        peaks = [
            (
                dict(outcome.point) != point,
                outcome.point["policy"] != recipe.policy.value,
                abs(math.log2(int(outcome.point[BATCH]) / recipe.batch_size)),
                outcome.measurement.peak_memory_bytes,
            )
            for outcome in self.history
            if outcome.measurement is not None
        ]
        return min(peaks)[-1] if peaks else 0

    def step_seconds_of(self, recipe: Recipe, baseline: Recipe) -> float:
        """Return a recipe's step time, as the cost model predicts it where it was not measured.

        A step of a larger batch takes longer in proportion only where it keeps the device busy. It
        is told from that of the `baseline`; 0 where that was not measured either.
        """
        measured, base = map(self.measurement_of, (recipe, baseline))
        if measured is not None or base is None:
            return 0.0 if measured is None else measured.step_seconds
        model = fit_model([outcome for outcome in self.history if outcome.rate > 0])
        plain, other = (model.predict(self.space.point(each)) for each in (baseline, recipe))
        larger = recipe.effective_batch / baseline.effective_batch
        return base.step_seconds * larger * math.exp(plain.mean - other.mean)

    def ready_seconds_of(self, recipe: Recipe) -> float:
        """Return what a recipe's session takes until its first steady step, a compiler included."""
        measured = self.measurement_of(recipe)
        if measured is not None:
            return measured.warmup_seconds
        if recipe.compile:
            return compile_seconds(self.history)
        return setup_seconds(self.history) or 0.0


def typical_measurement(trials: Trials, measured: Measured, recipe: Recipe) -> Measurement:
    """Return a recipe's typical measurement: of interleaved timing, else the search's.

    Raises `KeyError` where the recipe was never measured.
    """
    rounds = measured.get(recipe.key())
    if rounds:
        typical = median([each.step_seconds for each in rounds])
        nearest = min(rounds, key=lambda each: abs(each.step_seconds - typical))
        peak = max(each.peak_memory_bytes for each in rounds)
        return replace(nearest, peak_memory_bytes=peak or trials.peak_memory_of(recipe))
    trial = trials.measurement_of(recipe)
    if trial is None:
        raise KeyError(recipe.key())
    return trial
