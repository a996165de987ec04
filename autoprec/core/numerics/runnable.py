"""Searches the modules that a policy cannot run without in float32, as a function of history.

Code that mixes dtypes by hand raises under a 16-bit policy: a 16-bit result written into a float32
tensor, a kernel that does not exist. The exception tells whose code was running, so that module is
kept in float32 first, then the next one that raises. If nothing tells (a backward pass), modules
are tried by cost, as for numerics. Nothing here runs a model: `next_attempt` is given the outcome
of every set it proposed, and proposes the next, beginning with none.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from autoprec.core.measurement import Unit
from autoprec.core.numerics.island_proposals import IslandsFound, NoIslandsHelp, sets_by_cost

MAX_ATTEMPTS = 24
"""The most sets to try; each costs a step, or the part of one before it raises."""

MAX_SUSPECTS = 12
"""The most sets that follow exceptions from module to module."""


@dataclass(frozen=True)
class RunAttempt:
    """A set of modules kept in float32, whether a step ran with it, and else where it raised.

    `raised_in` are the paths of the modules whose code was running, innermost first; empty if
    the exception does not tell.
    """

    paths: tuple[str, ...]
    ran: bool
    raised_in: tuple[str, ...] = ()


def next_attempt(
    units: Sequence[Unit], history: Sequence[RunAttempt]
) -> tuple[str, ...] | IslandsFound | NoIslandsHelp:
    """Return the next set of modules to keep in float32 after `history`, or the search's end."""
    search = _search(units)
    try:
        proposal = next(search)
        for tried in history:
            if tried.paths != proposal:
                raise ValueError(f"history tried {tried.paths}, but {proposal} was proposed")
            proposal = search.send(tried)
    except StopIteration as end:
        return _conclude(end.value)
    if len(history) >= MAX_ATTEMPTS:
        ran = [tried.paths for tried in history if tried.ran]
        return _conclude(min(ran, key=len, default=None))
    return proposal


def _conclude(paths: tuple[str, ...] | None) -> IslandsFound | NoIslandsHelp:
    if paths is not None:
        return IslandsFound(paths)
    return NoIslandsHelp("it raises whichever modules are kept in float32")


_Search = Generator[tuple[str, ...], RunAttempt, tuple[str, ...] | None]


def _search(units: Sequence[Unit]) -> _Search:
    """Yield sets to try, receive what came of each, return the answer."""
    groups: list[tuple[str, ...]] = []
    tried = yield ()
    for _ in range(MAX_SUSPECTS):
        if tried.ran:
            return (yield from _without_needless(groups))
        suspects = _suspects(units, groups, tried.raised_in)
        if not suspects:
            break
        groups.append(suspects)
        tried = yield _joined(groups)
    if tried.ran:
        return (yield from _without_needless(groups))
    by_cost = sets_by_cost(units)
    try:
        proposal = next(by_cost)
        while True:
            tried = yield proposal
            proposal = by_cost.send(tried.ran)
    except StopIteration as end:
        answer: tuple[str, ...] | None = end.value
        return answer


def _suspects(
    units: Sequence[Unit], groups: Sequence[tuple[str, ...]], raised_in: Sequence[str]
) -> tuple[str, ...]:
    """Return what to keep in float32 besides `groups`: the innermost module that raised.

    If another module of its class raised before, all that have no matrix products go with it:
    what one layer of a stack does, the others do, too.
    """
    known = {unit.path: unit for unit in units if unit.own_code}
    kept = set(_joined(groups))
    path = next((each for each in raised_in if each in known and each not in kept), None)
    if path is None:
        return ()
    own = known[path]
    if own.products or all(known[each].kind != own.kind for each in kept):
        return (path,)
    alike = [each.path for each in known.values() if each.kind == own.kind and each.products == 0]
    return tuple(each for each in alike if each not in kept)


def _without_needless(groups: list[tuple[str, ...]]) -> _Search:
    """Leave out each group without which a step runs, too; the last one is needed."""
    for group in groups[:-1]:
        fewer = [each for each in groups if each is not group]
        if (yield _joined(fewer)).ran:
            groups = fewer
    return _joined(groups)


def _joined(groups: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(path for group in groups for path in group)
