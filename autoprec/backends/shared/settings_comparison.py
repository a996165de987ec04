"""Compares a recipe's settings with plain float32 at the initial weights, batch by batch.

Plain float32 computes whole batches; the recipe gets the same samples, cut into its micro-batches.
Dropout is off where they are cut, for a part draws other random numbers than the whole.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
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
    recipe, plain = settings_in_float32(recipe), plain_float32(recipe)
    count = recipe.accumulation_steps

    def whole(index: int) -> Update:
        return [(batch(plain.batch_size, index), seed(index))]

    def cut(index: int) -> Update | None:
        if count == 1:
            return whole(index)
        parts = framework.parts(batch(plain.batch_size, index), plain.batch_size, count)
        return None if parts is None else [(part, seed(index)) for part in parts]

    @contextlib.contextmanager
    def ready(made: Recipe, *, reference: bool) -> Iterator[Trainee]:
        with (
            trainee(made, 0, reference=reference) as model,
            model.without_dropout() if count > 1 else contextlib.nullcontext(),
        ):
            yield model

    observed: dict[int, Observed] = {}
    noise: list[SettingsPoint] = []
    with ready(plain, reference=True) as model:
        start = model.take_state()
        possible = [index for index in _affordable(model, agree) if cut(index) is not None]
        if not possible:
            return SettingsComparison(
                not_covered=(f"a whole batch of {plain.batch_size} cannot be cut in {count}",)
            )
        for index in possible:
            report("compare_settings", index)
            model.put_back(start)
            observed[index] = model.observe(whole(index))
        if count > 1 and any(each.drew for each in observed.values()):
            return SettingsComparison(not_covered=(_DRAWS,))
        rounding = model.rounding
        for draw in range(NOISE_DRAWS):
            for index in possible[:NOISE_BATCHES]:
                model.put_back(start)
                model.add_noise(draw, rounding)
                noise.append(_point(framework, index, model.observe(whole(index)), observed))
        model.put_back(start)
        trained = [whole(index) for index in possible[:UPDATES]]
        moved = model.weight_changes(trained)
    drifts = []
    for draw in range(NOISE_DRAWS):
        with ready(plain, reference=True) as model:  # the optimizer's state is new, too
            model.add_noise(draw, rounding)
            drifts.append(framework.gradient_error(model.weight_changes(trained), moved))
    points, shown = [], True
    with ready(replace(recipe, accumulation_steps=1), reference=False) as model:
        for index in possible:
            report("compare_settings", index)
            model.put_back(start)
            update = cut(index)
            assert update is not None
            found = model.observe(update)
            shown = shown and bool(found.outputs)
            points.append(_point(framework, index, found, observed))
    with ready(recipe, reference=False) as model:
        updates = [each for each in map(cut, possible[:UPDATES]) if each is not None]
        error = framework.gradient_error(model.weight_changes(updates), moved)
    return SettingsComparison(
        points=tuple(points),
        noise=tuple(noise),
        weights_error=error,
        weights_noise=tuple(drifts),
        updates=len(updates),
        outputs_seen=shown,
        drew=any(each.drew for each in observed.values()),
        rounding=rounding,
    )


def _affordable(model: Trainee, agree: Agree) -> Sequence[int]:
    """Return the batches whose gradients fit into main memory, as many on every rank."""
    kept = sorted(affordable_steps(frozenset(BATCHES), model.state_bytes()))
    return kept[: -int(agree(-len(kept)))]


def _point(
    framework: TraceFramework, index: int, found: Observed, observed: dict[int, Observed]
) -> SettingsPoint:
    plain = observed[index]
    return SettingsPoint(
        index,
        _finite(found.loss),
        _finite(plain.loss),
        framework.outputs_error(found.outputs, plain.outputs),
        framework.gradient_error(found.gradient, plain.gradient),
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
