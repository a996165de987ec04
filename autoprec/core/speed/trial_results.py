"""The outcomes of trials: which deserve a final, and which may have been disturbed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from autoprec.core.measurement import Measurement
from autoprec.core.speed.assumptions import SPEED
from autoprec.core.speed.cost_model import MeasuredRate, ThroughputModel
from autoprec.core.speed.noise import seems_disturbed
from autoprec.core.speed.selection import simplest_of_fastest
from autoprec.core.speed.space import Point, Space
from autoprec.core.statistics import median

#: The assumed error, as a logarithm, of a measurement that may have been disturbed.
_DISTURBED_LOG_DEVIATION = 0.3


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
    """One finished trial: where it was and what came of it."""

    point: Point
    status: Status
    measurement: Measurement | None = None
    reason: str = ""

    @property
    def rate(self) -> float:
        """Return samples per second; 0 where the trial failed."""
        if self.status is not Status.OK or self.measurement is None:
            return 0.0
        return self.measurement.samples_per_second

    @property
    def loader_feeds(self) -> float:
        """Return how many samples a second the loader feeds; infinite where that is not known."""
        return math.inf if self.measurement is None else self.measurement.loader_feeds


def ran(outcome: Outcome) -> bool:
    """Return whether a trial came to its end, so that its rate is known."""
    return outcome.rate > 0


def setup_seconds(history: Sequence[Outcome]) -> float | None:
    """Return the median of what trials took before their first steady step; None without trials."""
    setups = [
        outcome.measurement.warmup_seconds
        for outcome in history
        if outcome.measurement is not None and outcome.rate > 0
    ]
    return median(setups) if setups else None


def compile_seconds(history: Sequence[Outcome]) -> float:
    """Return the most that a compiled trial took before its first steady step, or what to assume.

    The setup of a trial that is not compiled is in it, too.
    """
    seen = [
        outcome.measurement.warmup_seconds
        for outcome in history
        if outcome.measurement is not None and outcome.point.get("compile")
    ]
    return max(seen, default=SPEED.compile_seconds)


def measured_rate(outcome: Outcome) -> MeasuredRate:
    """Convert an outcome that ran into the cost model's input."""
    measured = outcome.measurement
    width = 0.0
    if measured is not None and measured.low > 0:
        width = math.log(measured.high / measured.low) / 4
    return MeasuredRate(outcome.point, math.log(outcome.rate), min(width, 0.2))


def possibly_disturbed(history: Sequence[Outcome]) -> tuple[Outcome, ...]:
    """Return the outcomes that may be the fastest although others measured faster, best first.

    All others predict a rate near the fastest one's there, and another process can have taken the
    difference. One that runs for seconds slows a trial's second timing, too.
    """
    good = [outcome for outcome in history if outcome.rate > 0]
    rates = [measured_rate(outcome) for outcome in good]
    best = max((outcome.rate for outcome in good), default=0.0)
    found = []
    for number, outcome in enumerate(good):
        others = rates[:number] + rates[number + 1 :]
        if not others or outcome.rate == best:
            continue
        expected = math.exp(ThroughputModel(others).predict(outcome.point).mean)
        if expected >= SPEED.may_be_fastest_share * best and seems_disturbed(
            1 / outcome.rate, 1 / expected
        ):
            found.append((expected, outcome))
    return tuple(outcome for _, outcome in sorted(found, key=lambda item: -item[0]))


def fit_model(good: Sequence[Outcome]) -> ThroughputModel:
    """Fit the cost model to what ran; what may have been disturbed gets little weight."""
    disturbed = possibly_disturbed(good)
    rates = [measured_rate(outcome) for outcome in good]
    return ThroughputModel(
        [
            replace(rate, deviation=_DISTURBED_LOG_DEVIATION) if outcome in disturbed else rate
            for outcome, rate in zip(good, rates, strict=True)
        ]
    )


def shortlist(history: Sequence[Outcome], space: Space, *, count: int = 3) -> tuple[Outcome, ...]:
    """Return the outcomes worth a final: the fastest, or a simpler one as fast; then the next."""
    good = sorted((o for o in history if o.rate > 0), key=lambda o: -o.rate)
    if not good:
        return ()
    preferred = simplest_of_fastest(
        good,
        rate=lambda o: o.rate,
        recipe=lambda o: space.recipe(o.point),
        feeds=lambda o: o.loader_feeds,
        share=space.batch_share,
    )
    rest = [o for o in good if o is not preferred]
    return (preferred, *rest)[:count]
