"""Searches for float32 islands: the few modules that must stay in float32 for a recipe to pass.

Core proposes which modules to try next; here each proposal is proven.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autoprec.core.measurement import Unit
from autoprec.core.numerics.islands import IslandsFound, IslandTrial, NoIslandsHelp, next_islands
from autoprec.core.numerics.verdict import Verdict
from autoprec.core.recipe import Recipe

MAX_FLOAT32_PRODUCT_SHARE = 0.9
"""The share of the matrix products in float32 beyond which islands leave nothing to gain."""

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


def search_islands(
    units: Sequence[Unit],
    prove: ProveWithIslands,
    *,
    out_of_time: Callable[[], bool],
    on_trial: Callable[[int], None],
) -> IslandSearchResult:
    """Find the few modules that must stay in float32; `on_trial` is called with each number."""
    history: list[IslandTrial] = []
    proven: dict[tuple[str, ...], tuple[Recipe, Verdict]] = {}
    while True:
        step = next_islands(units, history)
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
    share = sum(unit.products for unit in units if unit.path in step.paths)
    if share > MAX_FLOAT32_PRODUCT_SHARE:
        reason = (
            f"it trains like float32 only with {100 * share:.3g} % of its matrix products in "
            "float32, which is float32 with casts"
        )
        return IslandSearchResult(None, None, reason, len(history), _tried(history), share)
    names = ", ".join(path or "the model's own forward" for path in step.paths)
    reason = f"trains like float32 with {names} (or a neighbour of it) kept in float32"
    return IslandSearchResult(recipe, verdict, reason, len(history), _tried(history), share)


def _key(paths: Sequence[str]) -> tuple[str, ...]:
    """Return the same key for a set of islands in any order."""
    return tuple(sorted(paths))


def _tried(history: Sequence[IslandTrial]) -> tuple[str, ...]:
    """Return every unit that was tried as an island."""
    return tuple(dict.fromkeys(path for trial in history for path in trial.paths))
