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
from functools import partial
from typing import Any

from autoprec.backends.protocol import ProgressCallback
from autoprec.backends.shared.buffer_updates import StepBuffers
from autoprec.backends.shared.checkpoint import affordable_steps
from autoprec.backends.shared.ranks import Agree
from autoprec.backends.shared.trace_framework import Evaluated, Observed, TraceFramework, Trainee
from autoprec.core.numerics.reference_recipe import plain_float32, settings_in_float32
from autoprec.core.numerics.tolerance import SMALLEST_LOSS_SHARE, or_infinity, relative_deviation
from autoprec.core.numerics.traces import SettingsComparison, SettingsPoint
from autoprec.core.recipe import Recipe
from autoprec.errors import first_line

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
        noise, metric_noise = comparison.noise(model, plain)
        moved = comparison.plain_updates(model, plain)
    drifts = comparison.drifts(plain, moved)
    points, outputs_seen, metric = comparison.points(plain, report)
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
        evaluated=plain.evaluated,
        metric_error=metric,
        metric_noise=metric_noise,
        rounding=plain.rounding,
        not_covered=plain.not_evaluated,
    )


@dataclass(frozen=True)
class _Seen:
    """What one batch gives: in training, and in evaluation from the same state.

    Of a batch that is cut, buffers and evaluation are those of its first part: what a step leaves
    in a buffer depends on what it gets at once.
    """

    observed: Observed
    buffers: StepBuffers
    evaluated: Evaluated | None


@dataclass(frozen=True)
class _Plain:
    """What plain float32 gives at the initial weights, by batch, and the size of its rounding.

    `metric` is what the task's `evaluate` gives, where it has one.
    """

    start: Any
    seen: Mapping[int, _Seen]
    rounding: float
    metric: Evaluated | None

    @property
    def drew(self) -> bool:
        return any(each.observed.drew for each in self.seen.values())

    @property
    def evaluated(self) -> bool:
        return any(_can_be_compared(each.evaluated) for each in self.seen.values())

    @property
    def not_evaluated(self) -> tuple[str, ...]:
        """Say why a batch is not evaluated, as where the step wants what only training gives it."""
        batches = [each.evaluated for each in self.seen.values()]
        known = {"the step in evaluation": batches, "the task's evaluate()": [self.metric]}
        return tuple(
            f"{what}: it raises {told}"
            for what, found in known.items()
            if (told := _problem(found))
        )

    @property
    def loss_scale(self) -> float:
        """Return the size below which a difference of losses is not one."""
        first = next(iter(self.seen.values())).observed.loss
        return SMALLEST_LOSS_SHARE * abs(first) if math.isfinite(first) else 0.0


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
        seen = {}
        for index in indices:
            report("compare_settings", index)
            seen[index] = self._see(model, index, self.whole(index), start)
        try:
            metric = self._metric(model, start)
        except Exception as error:
            metric = Evaluated(None, (), error)
        return _Plain(start, seen, model.rounding, metric)

    def noise(
        self, model: Trainee, plain: _Plain
    ) -> tuple[tuple[SettingsPoint, ...], tuple[float | None, ...]]:
        """Compute the first batches again, with noise of the rounding's size on the weights."""
        found: list[SettingsPoint] = []
        metrics = []
        for draw in range(NOISE_DRAWS):
            noisy = partial(model.add_noise, draw, plain.rounding)
            for index in [*plain.seen][:NOISE_BATCHES]:
                seen = self._see(model, index, self.whole(index), plain.start, noisy)
                found.append(self._point(index, seen, plain))
            metrics.append(self._metric_error(model, plain, found, noisy))
        return tuple(found), tuple(metrics)

    def _see(
        self,
        model: Trainee,
        index: int,
        update: Update,
        start: Any,
        prepare: Callable[[], None] = lambda: None,
    ) -> _Seen:
        """Train on a batch, then evaluate it; each from the start, and prepared."""

        def begin() -> None:
            model.put_back(start)
            prepare()

        begin()
        observed = model.observe(update)
        if self.count > 1:
            begin()
            model.observe([self._first_part(index)])
        buffers = StepBuffers.left_by(model, start, exact=True)
        begin()
        return _Seen(observed, buffers, model.evaluate_batch(*self._first_part(index)))

    def _first_part(self, index: int) -> tuple[Any, int]:
        return (self.cut(index) or self.whole(index))[0]

    def _metric(
        self, model: Trainee, start: Any, prepare: Callable[[], None] = lambda: None
    ) -> Evaluated | None:
        """Call the task's own `evaluate`, where it has one."""
        if not self._framework.has_evaluate:
            return None
        model.put_back(start)
        prepare()
        return model.evaluate_watched(self._seed(0))

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
    ) -> tuple[tuple[SettingsPoint, ...], bool, float | None]:
        """Compute every batch, and the metric, by the recipe.

        Say, too, whether its outputs were seen in all, and how far the metric is off.
        """
        found: list[SettingsPoint] = []
        shown = True
        with self.ready(replace(self.recipe, accumulation_steps=1), reference=False) as model:
            for index in plain.seen:
                report("compare_settings", index)
                update = self.cut(index)
                assert update is not None
                seen = self._see(model, index, update, plain.start)
                shown = shown and bool(seen.observed.outputs)
                found.append(self._point(index, seen, plain))
            metric = self._metric_error(model, plain, found)
        return tuple(found), shown, metric

    def _trained(self, plain: _Plain) -> list[Update]:
        return [self.whole(index) for index in [*plain.seen][:UPDATES]]

    def _point(self, index: int, found: _Seen, plain: _Plain) -> SettingsPoint:
        known = plain.seen[index]
        ours, theirs = found.observed, known.observed
        return SettingsPoint(
            index,
            _finite(ours.loss),
            _finite(theirs.loss),
            self._framework.outputs_error(ours.outputs, theirs.outputs),
            self._framework.gradient_error(ours.gradient, theirs.gradient),
            self._evaluation_error(found.evaluated, known.evaluated, plain.loss_scale),
            found.buffers.compared_with(known.buffers),
        )

    def _evaluation_error(
        self, found: Evaluated | None, known: Evaluated | None, scale: float
    ) -> float | None:
        """Return how far the outputs or the value of an evaluation are off, whichever is more.

        What the task's code raises in this evaluation alone is raised here.
        """
        if found is None or known is None or not _can_be_compared(known):
            return 0.0
        if found.error is not None and known.error is None:
            raise found.error
        outputs = self._framework.outputs_error(found.outputs, known.outputs)
        return _finite(max(or_infinity(outputs), _value_error(found, known, scale)))

    def _metric_error(
        self,
        model: Trainee,
        plain: _Plain,
        points: list[SettingsPoint],
        prepare: Callable[[], None] = lambda: None,
    ) -> float | None:
        """Return how far the metric is off; the last point learns how far the outputs are."""
        known = plain.metric
        found = self._metric(model, plain.start, prepare) if _can_be_compared(known) else None
        if found is None or known is None:
            return 0.0
        outputs = or_infinity(self._framework.outputs_error(found.outputs, known.outputs))
        worse = _finite(max(outputs, or_infinity(points[-1].evaluation_error)))
        points[-1] = replace(points[-1], evaluation_error=worse)
        return _finite(_value_error(found, known, 0.0))


def _affordable(model: Trainee, agree: Agree) -> Sequence[int]:
    """Return the batches whose gradients fit into main memory, as many on every rank."""
    kept = sorted(affordable_steps(frozenset(BATCHES), model.state_bytes()))
    return kept[: -int(agree(-len(kept)))]


def _problem(evaluations: Sequence[Evaluated | None]) -> str:
    """Return what the first of them raised that gave nothing."""
    errors = (each.error for each in evaluations if each and not _can_be_compared(each))
    return next((first_line(error) for error in errors if error is not None), "")


def _can_be_compared(evaluated: Evaluated | None) -> bool:
    """Say whether it gave anything: outputs, perhaps before it raised."""
    return evaluated is not None and (evaluated.error is None or bool(evaluated.outputs))


def _value_error(found: Evaluated, known: Evaluated, scale: float) -> float:
    if known.value is None or not math.isfinite(known.value):
        return 0.0
    return relative_deviation(found.value, known.value, scale)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
