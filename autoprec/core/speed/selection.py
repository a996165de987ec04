"""The last decision: which finalist is the recipe, from rounds measured in alternation.

Every finalist's rate is taken relative to the baseline's of the same round, because machines drift.
Among finalists that are as fast the smallest batch and the simplest recipe win; nothing that may be
slower than the baseline is ever chosen over it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from autoprec.core.dtypes import Policy
from autoprec.core.recipe import Recipe
from autoprec.core.statistics import Ratio, paired_ratio

T = TypeVar("T")

SAME_SPEED = 0.01
"""Recipes of one batch this near each other are as fast as each other."""

SAME_BATCH_SPEED = 0.0025
"""A smaller batch this near the fastest is as fast.

Two batches' ratio is known to a per cent or two, and what is given up here comes on top: of races
drawn from recorded rounds 4.7 % ended more than 3 % slower where 1 % was given up, 0.2 % where
nothing was.
"""

WORTH = 0.02
"""A recipe that gains less over the baseline is not worth its name."""


@dataclass(frozen=True)
class Finalist:
    """A recipe with its throughput in every round, in samples per second."""

    recipe: Recipe
    rates: tuple[float, ...]


@dataclass(frozen=True)
class Choice:
    """The recipe that won, its ratio to the baseline, and why."""

    recipe: Recipe
    ratio: Ratio
    reason: str


def complexity(recipe: Recipe) -> int:
    """How many settings differ from plain float32 training."""
    return (
        (recipe.policy is not Policy.FLOAT32)
        + (recipe.memory_format != "contiguous")
        + recipe.compile
        + len(recipe.knobs)
        + bool(recipe.float32_modules)
        + bool(recipe.alignment.modules)
        + (recipe.accumulation_steps > 1)
    )


def simplest_of_fastest(
    items: Sequence[T],
    rate: Callable[[T], float],
    batch: Callable[[T], int],
    settings: Callable[[T], int],
) -> T:
    """The item of fewest `settings` that is as fast as the fastest at the smallest such batch."""
    best = max(map(rate, items))
    near = [item for item in items if rate(item) >= best * (1 - SAME_BATCH_SPEED)]
    smallest = min(map(batch, near))
    lowest = best * (1 - SAME_SPEED)
    mates = [item for item in items if batch(item) == smallest and rate(item) >= lowest]
    return min(mates, key=lambda item: (settings(item), -rate(item)))


def choose(
    baseline: Finalist, others: Sequence[Finalist], *, baseline_allowed: bool = True
) -> Choice:
    """Choose among finalists; the baseline wins unless another is faster beyond the noise.

    With `baseline_allowed` false (float32 was not asked for) the fastest of the others is chosen
    whatever its ratio.
    """
    ratios = [(other, paired_ratio(other.rates, baseline.rates)) for other in others]
    faster = [item for item in ratios if not baseline_allowed or _faster(item[1])]
    if not faster:
        return Choice(baseline.recipe, Ratio(1.0, 1.0, 1.0, len(baseline.rates)), _why_not(ratios))
    finalist, ratio = simplest_of_fastest(
        faster,
        rate=lambda item: item[1].ratio,
        batch=lambda item: item[0].recipe.batch_size,
        settings=lambda item: complexity(item[0].recipe),
    )
    return Choice(finalist.recipe, ratio, "the fastest of those that train like float32")


def _faster(ratio: Ratio) -> bool:
    return ratio.low > 1.0 and ratio.ratio > 1.0 + WORTH


def _why_not(ratios: Sequence[tuple[Finalist, Ratio]]) -> str:
    if not ratios:
        return "nothing else was left to compare with"
    finalist, ratio = max(ratios, key=lambda item: item[1].ratio)
    return (
        f"nothing beats float32 beyond the noise: the best of the rest, {finalist.recipe.policy} "
        f"at batch {finalist.recipe.batch_size}, reaches {ratio.ratio:.2f}x "
        f"({ratio.low:.2f}-{ratio.high:.2f})"
    )
