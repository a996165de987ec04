"""Searches the few modules that must stay in float32, cheapest first, as a function of history.

A unit is the own code of one module. Modules without matrix products cost next to nothing in
float32, so they are tried first, all together; if that makes the policy train like float32,
bisection finds which of them are needed. Matrix products are added only if they must be. All units
in float32 is float32, so if even that fails, no island can help. Nothing here trains:
`next_islands` is given the outcome of every set it proposed, and proposes the next.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from autoprec.core.codec import bounded
from autoprec.core.measurement import Unit
from autoprec.errors import UsageError

MAX_TRIALS = 15
"""The most sets to try; the best that passed by then is chosen."""


@dataclass(frozen=True)
class IslandsEvidence:
    """How a profile's float32 modules were found, in how many trials, and what they cost.

    `share_of_products_in_float32` is theirs of the model's matrix products, `speed_kept` the speed
    with them over that of the policy without; 1 if it does not run without.
    """

    reason: str
    trials: int = bounded(low=0, high=10**6)
    share_of_products_in_float32: float = bounded(low=0.0, high=1.0)
    speed_kept: float = bounded(low=0.0, high=1e9)

    @classmethod
    def of(cls, trials: int, products: float, reason: str, speed: float = 1.0) -> IslandsEvidence:
        """Return it with as many digits as a profile shows."""
        return cls(reason, trials, round(products, 4), round(speed, 4))


@dataclass(frozen=True)
class IslandTrial:
    """A set of islands that was tried, and whether it trains like float32."""

    paths: tuple[str, ...]
    passed: bool


@dataclass(frozen=True)
class IslandsFound:
    """The search is over: the smallest set that passed."""

    paths: tuple[str, ...]


@dataclass(frozen=True)
class NoIslandsHelp:
    """The search is over: no set passed."""

    reason: str


def next_islands(
    units: Sequence[Unit], history: Sequence[IslandTrial]
) -> tuple[str, ...] | IslandsFound | NoIslandsHelp:
    """Return the next set of islands to try after `history`, or the end of the search."""
    search = sets_by_cost(units)
    try:
        proposal = next(search)
        for tried in history[:MAX_TRIALS]:
            if tuple(tried.paths) != proposal:
                raise ValueError(f"history tried {tried.paths}, but {proposal} was proposed")
            proposal = search.send(tried.passed)
    except StopIteration as end:
        return _conclude(end.value)
    if len(history) >= MAX_TRIALS:
        passed = [tried.paths for tried in history if tried.passed]
        work = {unit.path: unit.products for unit in units}
        cost = {paths: (sum(work[path] for path in paths), len(paths)) for paths in passed}
        return _conclude(min(cost, key=lambda paths: cost[paths], default=None))
    return proposal


def needed_islands(
    units: Sequence[Unit], passes: Callable[[tuple[str, ...]], bool]
) -> tuple[str, ...]:
    """Search at once: `passes` says whether a set of islands does; empty if none helps."""
    history: list[IslandTrial] = []
    while True:
        proposed = next_islands(units, history)
        if isinstance(proposed, IslandsFound):
            return proposed.paths
        if isinstance(proposed, NoIslandsHelp):
            return ()
        history.append(IslandTrial(proposed, passes(proposed)))


def _conclude(paths: tuple[str, ...] | None) -> IslandsFound | NoIslandsHelp:
    if paths is not None:
        return IslandsFound(paths)
    return NoIslandsHelp(
        "no set of float32 modules makes it train like float32: the model casts by hand, or "
        "computes outside of its modules' forward"
    )


SetsByCost = Generator[tuple[str, ...], bool, tuple[str, ...] | None]
"""Yields sets of modules to try, is sent whether each passed, returns the answer."""
_Minimize = Generator[tuple[str, ...], bool, tuple[str, ...]]


def sets_by_cost(units: Sequence[Unit]) -> SetsByCost:
    """Yield sets to try, receive whether each passed, return the answer."""
    without_products = [unit.path for unit in _ordered(units) if unit.products == 0]
    with_products = [unit.path for unit in _ordered(units) if unit.products > 0]
    if without_products and (yield tuple(without_products)):
        return (yield from _minimize(without_products, ()))
    if not with_products or not (yield (*without_products, *with_products)):
        return None
    chosen = yield from _minimize(with_products, tuple(without_products))
    products = chosen[len(without_products) :]
    if not without_products or (yield products):
        return products
    return (yield from _minimize(without_products, products))


def _ordered(units: Sequence[Unit]) -> list[Unit]:
    """Sort units by products, ascending; among equals leaves, then containers, then the root."""
    known = [unit for unit in units if unit.own_code]
    parents = {parent for unit in known for parent in _ancestors(unit.path)}

    def depth(unit: Unit) -> int:
        return 2 if not unit.path else 1 if unit.path in parents else 0

    return sorted(known, key=lambda unit: (unit.products, depth(unit)))


def _ancestors(path: str) -> list[str]:
    """Return the paths of the modules that contain the one at `path`."""
    parts = path.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _minimize(candidates: Sequence[str], base: tuple[str, ...]) -> _Minimize:
    """Find a minimal subset that passes together with `base`, given that all candidates do.

    `base` alone is known to fail. The shortest prefix that passes ends with a candidate that is
    needed; with that one in the base the rest is searched again, until the base alone passes. With
    k of n needed this takes k * (log2(n) + 1) trials.
    """
    needed: list[str] = []
    rest = list(candidates)
    while rest:
        low, high = 1, len(rest)  # the first `high` pass together; fewer than `low` do not
        while low < high:
            middle = (low + high) // 2
            if (yield (*base, *needed, *rest[:middle])):
                high = middle
            else:
                low = middle + 1
        needed.append(rest[high - 1])
        rest = rest[: high - 1]
        if rest and (yield (*base, *needed)):
            break
    return (*base, *needed)


def resolve_patterns(patterns: Sequence[str], units: Sequence[Unit]) -> tuple[str, ...]:
    """Return the module paths named by patterns: an exact path, else exactly one full match.

    A pattern is a path in which `*` and `?` stand for anything. No match and more than one are
    `UsageError`s that name what exists.
    """
    paths = [unit.path for unit in units]
    return tuple(dict.fromkeys(_resolve(pattern, paths) for pattern in patterns))


def _resolve(pattern: str, paths: Sequence[str]) -> str:
    if pattern in paths:
        return pattern
    matching = [path for path in paths if fnmatch.fnmatchcase(path, pattern)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        shown = f"{', '.join(matching[:4])}{', ...' if len(matching) > 4 else ''}"
        raise UsageError(
            f"float32_modules {pattern!r} matches {len(matching)} modules ({shown}), expected "
            "exactly one; give the exact path, or name each"
        )
    close = difflib.get_close_matches(pattern, paths, n=3)
    hint = f" Did you mean {', '.join(close)}?" if close else ""
    shown = ", ".join(path for path in paths[:8] if path)
    raise UsageError(
        f"float32_modules {pattern!r} matches no module; the model has {shown}"
        f"{', ...' if len(paths) > 8 else ''}.{hint}"
    )
