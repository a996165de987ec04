"""Searches for float32 islands: the few modules that must stay in float32 for a recipe to pass.

Core proposes which modules to try next; here each proposal is proven, or run where the recipe does
not even run without islands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autoprec.core.measurement import Unit
from autoprec.core.numerics.island_proposals import (
    IslandsFound,
    IslandTrial,
    NoIslandsHelp,
    next_islands,
)
from autoprec.core.numerics.runnable import RunAttempt, next_attempt
from autoprec.core.numerics.verdict import Verdict
from autoprec.core.recipe import Recipe

MAX_FLOAT32_PRODUCT_SHARE = 0.9
"""The share of the matrix products in float32 beyond which islands leave nothing to gain."""

RunWithIslands = Callable[[tuple[str, ...]], RunAttempt]
"""Runs a step with these modules kept in float32; says whether it ran, and else where it raised."""

ProveWithIslands = Callable[[tuple[str, ...]], tuple[Recipe, Verdict]]
"""Proves a recipe with these modules kept in float32; returns that recipe and its verdict."""


@dataclass(frozen=True)
class IslandSearchResult:
    """The recipe with islands that passes, and its verdict; None where no islands help.

    `products` is the share of the model's matrix-product work that stays in float32.
    """

    recipe: Recipe | None
    verdict: Verdict | None
    reason: str
    trials: int
    tried: tuple[str, ...] = ()
    products: float = 0.0


@dataclass(frozen=True)
class RunnableSearchResult:
    """The modules that must stay in float32 for a recipe to run: none where it runs as it is.

    `paths` is None where no such set was found, for the `reason`.
    """

    paths: tuple[str, ...] | None
    attempts: int = 0
    reason: str = ""


def search_runnable(
    units: Sequence[Unit], run: RunWithIslands, *, out_of_time: Callable[[], bool]
) -> RunnableSearchResult:
    """Find the few modules that must stay in float32 for a recipe to run at all."""
    history: list[RunAttempt] = []
    while True:
        step = next_attempt(units, history)
        if isinstance(step, NoIslandsHelp):
            return RunnableSearchResult(None, len(history), step.reason)
        if isinstance(step, IslandsFound):
            break
        if out_of_time():
            reason = "the time limit ended the search for modules to keep in float32"
            return RunnableSearchResult(None, len(history), reason)
        history.append(run(step))
    share = product_share(units, step.paths)
    if share > MAX_FLOAT32_PRODUCT_SHARE:
        reason = (
            f"it runs only with {100 * share:.3g} % of its matrix products in float32, which is "
            "float32 with casts"
        )
        return RunnableSearchResult(None, len(history), reason)
    return RunnableSearchResult(step.paths, len(history))


def product_share(units: Sequence[Unit], paths: Sequence[str]) -> float:
    """Return the share of the model's matrix products that these modules' own code computes."""
    return sum(unit.products for unit in units if unit.path in paths)


def name_modules(paths: Sequence[str]) -> str:
    """Name modules for people: the root has no path."""
    return ", ".join(path or "the model's own forward" for path in paths)


def search_islands(
    units: Sequence[Unit],
    prove: ProveWithIslands,
    *,
    kept: tuple[str, ...] = (),
    out_of_time: Callable[[], bool],
    on_trial: Callable[[int], None],
) -> IslandSearchResult:
    """Find the few modules that must stay in float32 besides those that are `kept` there anyway.

    `on_trial` is called with each trial's number.
    """
    others = [unit for unit in units if unit.path not in kept]
    history: list[IslandTrial] = []
    proven: dict[tuple[str, ...], tuple[Recipe, Verdict]] = {}
    while True:
        step = next_islands(others, history)
        if isinstance(step, NoIslandsHelp):
            return IslandSearchResult(None, None, step.reason, len(history), _tried(history))
        if isinstance(step, IslandsFound):
            break
        if out_of_time():
            reason = "the time limit ended the search for modules to keep in float32"
            return IslandSearchResult(None, None, reason, len(history), _tried(history))
        on_trial(len(history))
        recipe, verdict = prove(step)
        proven[_key(step)] = recipe, verdict
        history.append(IslandTrial(step, verdict.accepted))
    recipe, verdict = proven[_key(step.paths)]
    share = product_share(units, (*kept, *step.paths))
    if share > MAX_FLOAT32_PRODUCT_SHARE:
        reason = (
            f"it trains like float32 only with {100 * share:.3g} % of its matrix products in "
            "float32, which is float32 with casts"
        )
        return IslandSearchResult(None, None, reason, len(history), _tried(history), share)
    names = name_modules((*kept, *step.paths))
    reason = f"trains like float32 with {names} (or a neighbour of it) kept in float32"
    return IslandSearchResult(recipe, verdict, reason, len(history), _tried(history), share)


def _key(paths: Sequence[str]) -> tuple[str, ...]:
    """Return the same key for a set of islands in any order."""
    return tuple(sorted(paths))


def _tried(history: Sequence[IslandTrial]) -> tuple[str, ...]:
    """Return every unit that was tried as an island."""
    return tuple(dict.fromkeys(path for trial in history for path in trial.paths))
