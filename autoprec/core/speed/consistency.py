"""Whether what was measured can be believed: where it contradicts itself, nothing is concluded.

Machines are noisy, and most of the noise is dealt with: rounds in alternation, intervals, a drift
that is taken out. What is asked here is whether that was enough. A step that a neighbour disturbs
takes up to 65 % longer; numbers further apart than that can explain were taken on a machine that
was another one each time, and a recipe chosen by them would be chosen by luck.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autoprec.core.statistics import Ratio, median

WIDE = 1.5
"""An interval whose ends are this many times apart is too wide, where it also is wider than the
gain that it is the interval of: "1.48x (1.10-2.18)". Of the recorded tunings' none is."""

APART = 2.0
"""Two intervals of one ratio, the search's and the rounds', contradict each other where they lie
this many times apart: one disturbed step in either explains 1.65."""

ANOTHER_PACE = math.sqrt(10)
"""A recipe that runs so many times faster or slower than before is nearer to an order of magnitude
than to its own pace. A busy neighbour takes half of a machine."""


@dataclass(frozen=True)
class Pace:
    """How fast one recipe ran in the search and in the rounds, in samples a second by the clock."""

    name: str
    search: float
    rounds: tuple[float, ...]


def too_wide(ratio: Ratio) -> bool:
    """Whether the interval is so wide, relative to the gain, that the gain means nothing.

    An interval below 1 leaves no doubt of what matters: it is slower.
    """
    if ratio.low <= 0 or ratio.high < 1.0:
        return False
    width = math.log(ratio.high / ratio.low)
    return width > math.log(WIDE) and width > abs(math.log(ratio.ratio))


def another_pace(before: float, after: float) -> bool:
    """Whether one recipe's two rates are an order of magnitude apart."""
    return abs(math.log(before / after)) > math.log(ANOTHER_PACE)


def contradict(one: Ratio, other: Ratio) -> bool:
    """Whether two measurements of one ratio lie so far apart that they cannot both be right."""
    if min(one.low, other.low) <= 0:
        return False
    return max(one.low, other.low) > APART * min(one.high, other.high)


def doubts(ratio: Ratio | None, searched: Ratio | None, paces: Sequence[Pace]) -> tuple[str, ...]:
    """Why the ratio to the baseline cannot be believed; empty where it can.

    `ratio` is that of the rounds, `searched` the same as the search saw it; None: there is none.
    """
    found = []
    for pace in paces:
        after = median(pace.rounds)
        if pace.search > 0 and after > 0 and another_pace(pace.search, after):
            found.append(
                f"{pace.name} ran at {_rate(pace.search)} samples/s in the search and at "
                f"{_rate(after)} in the final rounds"
            )
    if ratio is None:
        return tuple(found)
    if searched is not None and contradict(ratio, searched):
        found.append(f"the search saw {searched.ratio:.2f}x, the final rounds {_shown(ratio)}")
    if too_wide(ratio):
        found.append(f"the final rounds saw {_shown(ratio)}, which may be anything")
    return tuple(found)


def _rate(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"


def _shown(ratio: Ratio) -> str:
    return f"{ratio.ratio:.2f}x ({ratio.low:.2f}-{ratio.high:.2f})"
