"""What trials came to, which of them deserve a further look, and which are in doubt."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from autoprec.core.measurement import Measurement
from autoprec.core.speed.cost_model import Seen, ThroughputModel
from autoprec.core.speed.selection import simplest_of_fastest
from autoprec.core.speed.space import BATCH, Point
from autoprec.core.statistics import disturbed

#: Who is foreseen to reach this share of the fastest one's rate may be the fastest.
_NEAR = 0.95


class Status(StrEnum):
    """How a trial ended. Only `OUT_OF_MEMORY` means that the batch is too big."""

    OK = "ok"
    OUT_OF_MEMORY = "out_of_memory"
    WOULD_NOT_FIT = "would_not_fit"
    SHORT_DATA = "short_data"
    TIMEOUT = "timeout"
    KILLED = "killed"
    CRASHED = "crashed"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True)
class Outcome:
    """One finished trial: where it was and what came of it.

    `drift` is how fast the reference ran beside it relative to its first time (1: as then).
    """

    point: Point
    status: Status
    measurement: Measurement | None = None
    reason: str = ""
    drift: float = 1.0

    @property
    def rate(self) -> float:
        """Samples per second, the machine's drift taken out; 0 where the trial failed."""
        if self.status is not Status.OK or self.measurement is None:
            return 0.0
        return self.measurement.samples_per_second / self.drift


def key(point: Point) -> tuple[tuple[str, object], ...]:
    """A hashable identity of a point."""
    return tuple(sorted(point.items()))


def seen(outcome: Outcome) -> Seen:
    """What the cost model takes of an outcome that ran."""
    measured = outcome.measurement
    width = 0.0
    if measured is not None and measured.low > 0:
        width = math.log(measured.high / measured.low) / 4
    return Seen(outcome.point, math.log(outcome.rate), min(width, 0.2))


def suspects(history: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """The outcomes that may be the fastest although they were not measured so, likeliest first.

    All others foresee a rate near the fastest one's there, and a neighbour on the machine can have
    taken what is missing. One that stays beside a trial for seconds slows its second timing too.
    """
    good = [outcome for outcome in history if outcome.rate > 0]
    best = max((outcome.rate for outcome in good), default=0.0)
    found = []
    for outcome in good:
        others = [seen(other) for other in good if other is not outcome]
        if not others or outcome.rate == best:
            continue
        foreseen = math.exp(ThroughputModel(others).predict(outcome.point).mean)
        if foreseen >= _NEAR * best and disturbed(1 / outcome.rate, 1 / foreseen):
            found.append((foreseen, outcome))
    return tuple(outcome for _, outcome in sorted(found, key=lambda item: -item[0]))


def shortlist(history: Sequence[Outcome], *, count: int = 3) -> tuple[Outcome, ...]:
    """The outcomes worth a final, best first: the fastest, or a simpler one as fast as it.

    What follows are the next fastest.
    """
    good = sorted((o for o in history if o.rate > 0), key=lambda o: -o.rate)
    if not good:
        return ()
    preferred = simplest_of_fastest(
        good,
        rate=lambda o: o.rate,
        batch=lambda o: int(o.point[BATCH]),
        settings=lambda o: _complexity(o.point),
    )
    rest = [o for o in good if o is not preferred]
    return (preferred, *rest)[:count]


def _complexity(point: Point) -> int:
    """How many settings of a point differ from plain training."""
    plain = {"policy": "float32", "memory_format": "contiguous", "compile": False, "alignment": 1}
    return sum(point.get(name, value) != value for name, value in plain.items()) + sum(
        1 for name in point if name not in plain and name != BATCH and point[name]
    )
