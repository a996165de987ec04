"""Compares a recipe's settings with plain float32 at the initial weights, batch by batch.

Plain float32 computes whole batches; the recipe gets the same samples, cut into its micro-batches.
Dropout is off where they are cut, for a part draws other random numbers than the whole.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from autoprec.backends.protocol import ProgressCallback
from autoprec.backends.shared.checkpoint_budget import affordable_steps
from autoprec.backends.shared.ranks import Agree
from autoprec.backends.shared.trace_framework import Observed, TraceFramework, Trainee
from autoprec.core.numerics.reference_recipe import plain_float32, settings_in_float32
from autoprec.core.numerics.traces import SettingsComparison, SettingsPoint
from autoprec.core.recipe import Recipe

BATCHES = (0, 1, 4, 13, 29)
"""The batches that are compared: the first ones, and some from further in the data."""

NOISE_DRAWS, NOISE_BATCHES = 2, 2
"""Perturbed computations of each of the first batches."""

UPDATES = 2
"""Updates after which weights are compared: only the second one reads the optimizer's state."""

_DRAWS = "a step draws random numbers of its own besides dropout, so that its parts draw others"

Update = Sequence[tuple[Any, int]]
MakeTrainee = Callable[..., AbstractContextManager[Trainee]]


def compare_settings(
    framework: TraceFramework,
    recipe: Recipe,
    *,
    trainee: MakeTrainee,
    batch: Callable[[int, int], Any],
    seed: Callable[[int], int],
    agree: Agree,
    report: ProgressCallback,
) -> SettingsComparison:
    """See `Tracer.compare_settings`."""
    comparison = _Comparison(framework, recipe, trainee, batch, seed)
    with comparison.ready(comparison.plain, reference=True) as model:
        possible = comparison.possible(_affordable(model, agree))
        if not possible:
            whole = comparison.plain.batch_size
            return SettingsComparison(
                not_covered=(f"a whole batch of {whole} cannot be cut in {comparison.count}",)
            )
        plain = comparison.observe_plain(model, possible, report)
        if comparison.count > 1 and plain.drew:
            return SettingsComparison(not_covered=(_DRAWS,))
        noise = comparison.noise(model, plain)
        moved = comparison.plain_updates(model, plain)
    drifts = comparison.drifts(plain, moved)
    points, outputs_seen = comparison.points(plain, report)
    updates = [each for each in map(comparison.cut, possible[:UPDATES]) if each is not None]
    with comparison.ready(comparison.recipe, reference=False) as model:
        error = framework.gradient_error(model.weight_changes(updates), moved)
    return SettingsComparison(
        points=points,
        noise=noise,
        weights_error=error,
        weights_noise=drifts,
        updates=len(updates),
        outputs_seen=outputs_seen,
        drew=plain.drew,
        rounding=plain.rounding,
    )


@dataclass(frozen=True)
class _Plain:
    """What plain float32 gives at the initial weights, by batch, and the size of its rounding."""

    start: Any
    observed: Mapping[int, Observed]
    rounding: float

    @property
    def drew(self) -> bool:
        return any(each.drew for each in self.observed.values())


class _Comparison:
    """A recipe's settings in float32, plain float32, and the batches that both get."""

    def __init__(
        self,
        framework: TraceFramework,
        recipe: Recipe,
        trainee: MakeTrainee,
        batch: Callable[[int, int], Any],
        seed: Callable[[int], int],
    ) -> None:
        self._framework, self._trainee, self._batch, self._seed = framework, trainee, batch, seed
        self.recipe, self.plain = settings_in_float32(recipe), plain_float32(recipe)
        self.count = recipe.accumulation_steps

    def whole(self, index: int) -> Update:
        """Return a batch as plain float32 gets it."""
        return [(self._batch(self.plain.batch_size, index), self._seed(index))]

    def cut(self, index: int) -> Update | None:
        """Return a batch as the recipe gets it; None where it cannot be cut."""
        if self.count == 1:
            return self.whole(index)
        ((batch, seed),) = self.whole(index)
        parts = self._framework.parts(batch, self.plain.batch_size, self.count)
        return None if parts is None else [(part, seed) for part in parts]

    def possible(self, indices: Sequence[int]) -> Sequence[int]:
        """Return the batches that can be cut."""
        return [index for index in indices if self.cut(index) is not None]

    @contextlib.contextmanager
    def ready(self, made: Recipe, *, reference: bool) -> Iterator[Trainee]:
        """Give a new model, without dropout where batches are cut."""
        with (
            self._trainee(made, 0, reference=reference) as model,
            model.without_dropout() if self.count > 1 else contextlib.nullcontext(),
        ):
            yield model

    def observe_plain(
        self, model: Trainee, indices: Sequence[int], report: ProgressCallback
    ) -> _Plain:
        """Compute every batch at the initial weights."""
        start = model.take_state()
        observed = {}
        for index in indices:
            report("compare_settings", index)
            model.put_back(start)
            observed[index] = model.observe(self.whole(index))
        return _Plain(start, observed, model.rounding)

    def noise(self, model: Trainee, plain: _Plain) -> tuple[SettingsPoint, ...]:
        """Compute the first batches again, with noise of the rounding's size on the weights."""
        found = []
        for draw in range(NOISE_DRAWS):
            for index in [*plain.observed][:NOISE_BATCHES]:
                model.put_back(plain.start)
                model.add_noise(draw, plain.rounding)
                found.append(self._point(index, model.observe(self.whole(index)), plain))
        return tuple(found)

    def plain_updates(self, model: Trainee, plain: _Plain) -> Any:
        """Train plain float32; return how far every weight moved."""
        model.put_back(plain.start)
        return model.weight_changes(self._trained(plain))

    def drifts(self, plain: _Plain, moved: Any) -> tuple[float | None, ...]:
        """Return how far from `moved` the weights move with noise; the optimizers are new."""
        found = []
        for draw in range(NOISE_DRAWS):
            with self.ready(self.plain, reference=True) as model:
                model.add_noise(draw, plain.rounding)
                changes = model.weight_changes(self._trained(plain))
                found.append(self._framework.gradient_error(changes, moved))
        return tuple(found)

    def points(
        self, plain: _Plain, report: ProgressCallback
    ) -> tuple[tuple[SettingsPoint, ...], bool]:
        """Compute every batch by the recipe; say, too, whether its outputs were seen in all."""
        found, shown = [], True
        with self.ready(replace(self.recipe, accumulation_steps=1), reference=False) as model:
            for index in plain.observed:
                report("compare_settings", index)
                model.put_back(plain.start)
                update = self.cut(index)
                assert update is not None
                observed = model.observe(update)
                shown = shown and bool(observed.outputs)
                found.append(self._point(index, observed, plain))
        return tuple(found), shown

    def _trained(self, plain: _Plain) -> list[Update]:
        return [self.whole(index) for index in [*plain.observed][:UPDATES]]

    def _point(self, index: int, found: Observed, plain: _Plain) -> SettingsPoint:
        known = plain.observed[index]
        return SettingsPoint(
            index,
            _finite(found.loss),
            _finite(known.loss),
            self._framework.outputs_error(found.outputs, known.outputs),
            self._framework.gradient_error(found.gradient, known.gradient),
        )


def _affordable(model: Trainee, agree: Agree) -> Sequence[int]:
    """Return the batches whose gradients fit into main memory, as many on every rank."""
    kept = sorted(affordable_steps(frozenset(BATCHES), model.state_bytes()))
    return kept[: -int(agree(-len(kept)))]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
