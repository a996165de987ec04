"""Judges whether a profile's claims still hold, given its recipe measured and checked again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autoprec.core.numerics.verdict import Verdict
from autoprec.core.ratio import Ratio

CHANGE_SHARE = 0.1
"""A speed-up may fall by this share before its claim fails.

The same recipe's ratio differs by a few per cent from one day, and one process, to the next.
"""

Holds = Literal["holds", "fails", "unresolved"]


@dataclass(frozen=True)
class Claim:
    """One claim of a profile: what it stated, what was found now, and whether it holds.

    "throughput" is the samples per second over those of the baseline's smaller or larger batch,
    "end to end" the speed-up of whole updates of a script.
    """

    name: Literal[
        "speed-up", "throughput", "over yours", "numerics", "runs", "end to end", "losses"
    ]
    result: Holds
    stated: str
    found: str


@dataclass(frozen=True)
class Verification:
    """What came of verifying a profile; `notes` say what has changed since it was made."""

    claims: tuple[Claim, ...]
    speedup: Ratio | None = None
    parity: Verdict | None = None
    notes: tuple[str, ...] = ()

    @property
    def failed(self) -> tuple[Claim, ...]:
        """Return the claims that do not hold any more."""
        return tuple(each for each in self.claims if each.result == "fails")

    @property
    def holds(self) -> bool:
        """Return whether no claim fails; what is unresolved does not."""
        return not self.failed


def judge_speedup(stated: Ratio, found: Ratio) -> Holds:
    """Judge a stated speed-up by one found now.

    It fails where the whole interval found lies below `CHANGE_SHARE` under the one stated, or where
    what is stated contradicts itself; it holds where the ratio found does not lie below that.
    """
    if not stated.low <= stated.ratio <= stated.high:
        return "fails"
    least = stated.low * (1.0 - CHANGE_SHARE)
    if found.high < least:
        return "fails"
    return "holds" if found.ratio >= least else "unresolved"


def judge_numerics(stated: Verdict, found: Verdict) -> Holds:
    """Judge a stated verdict by one found now; a better one holds, too."""
    if found.verdict == "unproven":
        return "unresolved"
    ranks: Sequence[str] = ("rejected", "drift", "equal at single steps", "equal")
    # as far as a short check can repeat it
    least = "rejected" if stated.verdict == "unproven" else stated.verdict
    return "holds" if ranks.index(found.verdict) >= ranks.index(least) else "fails"
