"""Chooses the recipe among the finalists, from rounds measured in alternation.

Every finalist's rate is taken relative to the baseline's of the same round, because machines drift.
Among equally fast finalists the smallest batch and the simplest recipe win; nothing that may be
slower than the baseline is ever chosen over it. A batch is worth no more samples a second than the
loader feeds; recipes of one batch are compared by their steps alone. Rounding that no policy asks
for (gradients between ranks, float32 products everywhere) is a risk, so it is kept only where it
gains beyond the noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from autoprec.core.dtypes import Policy
from autoprec.core.measurement import Measurement
from autoprec.core.numerics.reference_recipe import count_global_roundings
from autoprec.core.ratio import Ratio
from autoprec.core.recipe import COMPILE_SCOPE, Recipe, communication_settings
from autoprec.core.recipe_words import name_recipe
from autoprec.core.speed.assumptions import SPEED
from autoprec.core.speed.noise import is_faster, paired_ratio

T = TypeVar("T")


@dataclass(frozen=True)
class Finalist:
    """A recipe with its throughput in every round, in samples per second.

    `loader_feeds` is how many samples a second the loader feeds at its batch; None: any number.
    """

    recipe: Recipe
    rates: tuple[float, ...]
    loader_feeds: float | None = None


def finalist_of(recipe: Recipe, measured: Sequence[Measurement]) -> Finalist:
    """Return a recipe with its measurement of every round."""
    feeds = max((each.loader_feeds for each in measured), default=math.inf)
    rates = tuple(each.samples_per_second for each in measured)
    return Finalist(recipe, rates, feeds if math.isfinite(feeds) else None)


@dataclass(frozen=True)
class Choice:
    """The recipe that won, its ratio to the baseline, and why."""

    recipe: Recipe
    ratio: Ratio
    reason: str


def count_settings(recipe: Recipe) -> int:
    """Return how many settings differ from plain float32 training.

    What is compiled is none of its own: blocks take fewer seconds than the whole model.
    """
    return (
        (recipe.policy is not Policy.FLOAT32)
        + (recipe.memory_format != "contiguous")
        + recipe.compile
        + sum(name != COMPILE_SCOPE for name in recipe.knobs)
        + len(communication_settings(recipe))
        + bool(recipe.float32_modules)
        + bool(recipe.alignment.modules)
        + (recipe.accumulation_steps > 1)
    )


def smallest_of_fastest(
    items: Sequence[T],
    rate: Callable[[T], float],
    feeds: Callable[[T], float],
    batch: Callable[[T], int],
    *,
    share: float,
) -> int:
    """Return the smallest batch within `share` of the most samples a second that can be trained.

    That is the step's `rate`, or what the loader `feeds` where that is less.
    """

    def allowed(item: T) -> float:
        return max(share, SPEED.loader_share) if feeds(item) < rate(item) else share

    best = max(min(rate(item), feeds(item)) for item in items)
    near = (i for i in items if min(rate(i), feeds(i)) >= best * (1 - allowed(i)))
    return min(map(batch, near))


def simplest_of_fastest(
    items: Sequence[T],
    rate: Callable[[T], float],
    recipe: Callable[[T], Recipe],
    feeds: Callable[[T], float] = lambda item: math.inf,
    *,
    share: float = SPEED.knee_share,
) -> T:
    """Return the item of fewest settings among the fastest ones at the smallest such batch."""
    smallest = smallest_of_fastest(
        items, rate, feeds, lambda item: recipe(item).batch_size, share=share
    )
    alike = [item for item in items if recipe(item).batch_size == smallest]
    lowest = max(map(rate, alike)) * (1 - SPEED.same_speed_share)
    equals = [item for item in alike if rate(item) >= lowest]
    return min(equals, key=lambda item: (count_settings(recipe(item)), -rate(item)))


def choose(
    baseline: Finalist,
    others: Sequence[Finalist],
    *,
    baseline_allowed: bool = True,
    share: float = SPEED.knee_share,
) -> Choice:
    """Choose among finalists; the baseline wins unless another is faster beyond the noise.

    With `baseline_allowed` false (float32 was not requested) the fastest of the others is chosen
    whatever its ratio. A smaller batch within `share` of the fastest is preferred.
    """
    own = sum(baseline.rates) / len(baseline.rates)
    ratios = [(other, paired_ratio(other.rates, baseline.rates)) for other in others]
    faster = [item for item in ratios if not baseline_allowed or is_faster(item[1])]
    if not faster:
        return Choice(
            baseline.recipe, Ratio(1.0, 1.0, 1.0, len(baseline.rates)), _explain_baseline(ratios)
        )
    finalist, ratio = _least_rounding(_simplest(faster, own, share), faster, own)
    return Choice(finalist.recipe, ratio, "the fastest of those that train like float32")


def _simplest(
    items: Sequence[tuple[Finalist, Ratio]], baseline_rate: float, share: float
) -> tuple[Finalist, Ratio]:
    def feeds(item: tuple[Finalist, Ratio]) -> float:
        known = item[0].loader_feeds
        return math.inf if known is None else known / baseline_rate

    return simplest_of_fastest(
        items,
        rate=lambda item: item[1].ratio,
        recipe=lambda item: item[0].recipe,
        feeds=feeds,
        share=share,
    )


def _least_rounding(
    leader: tuple[Finalist, Ratio], items: Sequence[tuple[Finalist, Ratio]], baseline_rate: float
) -> tuple[Finalist, Ratio]:
    """Return the item of least rounding that the leader does not beat beyond the noise.

    Only those of the leader's batch and policy count.
    """

    def roundings(item: tuple[Finalist, Ratio]) -> int:
        return count_global_roundings(item[0].recipe)

    def like_leader(recipe: Recipe) -> bool:
        own = leader[0].recipe
        return (recipe.batch_size, recipe.policy) == (own.batch_size, own.policy)

    as_fast = [
        item
        for item in items
        if like_leader(item[0].recipe)
        and roundings(item) < roundings(leader)
        and not is_faster(paired_ratio(leader[0].rates, item[0].rates))
    ]
    if not as_fast:
        return leader
    least = min(map(roundings, as_fast))
    rounded_least = [item for item in as_fast if roundings(item) == least]
    return _simplest(rounded_least, baseline_rate, SPEED.most_share)


def _explain_baseline(ratios: Sequence[tuple[Finalist, Ratio]]) -> str:
    if not ratios:
        return "nothing else was left to compare with"
    finalist, ratio = max(ratios, key=lambda item: item[1].ratio)
    return (
        "nothing beats the baseline beyond the noise: the best of the rest, "
        f"{name_recipe(finalist.recipe)}, reaches {ratio.in_words()}"
    )
