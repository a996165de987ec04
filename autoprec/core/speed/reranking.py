"""Re-ranks the fastest recipes of a search: which of them race, and what their rounds tell.

The search times a recipe once, each at another moment, and machines drift by more than the fastest
recipes differ. So the fastest are timed again, in alternation, before any is proven. One recipe
that was slower than all others predict runs along, if there is one: another process may have slowed
it.

Corrected rates may make the search propose another recipe after all (the batch next to one that was
slowed, say). So the search continues, and what it then measures races against the winner. If the
search's timings turn out to be noisier than assumed, recipes that seemed too slow to race do so
once, too: on a machine with intermittent load, a recipe may have been the only one affected. The
confirmation may be what shows it: a neighbour that uses up the shared cache slows small batches
alone, and with them the baseline, by which all seemed faster than they are.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, compress
from statistics import stdev

from autoprec.core.speed import best_arm
from autoprec.core.speed.cost_model import Prediction
from autoprec.core.speed.noise import paired_ratio
from autoprec.core.speed.space import point_key
from autoprec.core.speed.stopping import GAIN_PER_SECOND
from autoprec.core.speed.trial_results import Outcome, possibly_disturbed

SEARCH_RATIO_ERROR = 0.1
"""How far the ratio of two recipes in the search may be off, as a logarithm, unless known better.

Each was timed once, for half a second, and the fastest of many is often only the luckiest.
"""

MAX_ROUNDS = 20
"""The most rounds of a race."""

#: At most this many recipes race; the second number is for a search whose rates are not believed.
_MAX_RECIPES, _MAX_RECIPES_IN_DOUBT = 5, 10

#: Seconds that setup and rounds may take, by the search's timings. Where the fewest rounds that can
#: decide do not fit, fewer recipes race; where that leaves none to compare, the search's order
#: holds.
_MAX_SECONDS = 30.0

FitsTogether = Callable[[Sequence[Outcome]], bool]
"""Whether the memory suffices for all of these at once."""


@dataclass(frozen=True)
class RaceCost:
    """Seconds that it takes to set up all contenders once, and for each contender's turn."""

    setup_seconds: float
    turn_seconds: tuple[float, ...]

    @property
    def min_seconds(self) -> float:
        """Return the duration of the fewest rounds that can decide."""
        return self.setup_seconds + best_arm.MIN_ROUNDS * sum(self.turn_seconds)

    def select_contenders(self, rates: Sequence[Sequence[float]]) -> Collection[int]:
        """Return who runs another round, by number; empty when the race or its time is over."""
        turns = zip(rates, self.turn_seconds, strict=True)
        spent = self.setup_seconds + sum(len(own) * seconds for own, seconds in turns)
        if spent >= _MAX_SECONDS:
            return ()
        return best_arm.select_contenders(rates, self.turn_seconds)


@dataclass(frozen=True)
class Race:
    """The recipes that race, and what that costs.

    `reliable` says of each whether the search's rate is trusted; those set the scale of the rates.
    """

    contenders: tuple[Outcome, ...]
    reliable: tuple[bool, ...]
    cost: RaceCost


@dataclass(frozen=True)
class Reranking:
    """The recipes that have raced, with the rates from their rounds, or as failed.

    The study keeps it under these field names. `trials` is how many the search had made by then,
    `luck` how far the ratio of two of its rates may be off, as a logarithm.
    """

    ran: tuple[Outcome, ...] = ()
    trials: int = 0
    luck: float = SEARCH_RATIO_ERROR

    def ranking(self, history: Sequence[Outcome]) -> tuple[Outcome, ...]:
        """Return the history, with every recipe that raced as it came out there."""
        raced = self._by_key()
        return tuple(raced.get(point_key(o.point), o) for o in history)

    def corrected(self, history: Sequence[Outcome]) -> tuple[Outcome, ...]:
        """Return what the search may learn from: the ranking, without failures in a race."""
        return tuple(
            measured if ranked.rate <= 0 else ranked
            for measured, ranked in zip(history, self.ranking(history), strict=True)
        )

    def next_race(
        self, history: Sequence[Outcome], allowed: Callable[[Outcome], bool], fit: FitsTogether
    ) -> Race | None:
        """Return the next race among those `allowed`; None where none may beat the winner.

        The winner runs against those that have not raced yet: new ones, and those that may be as
        fast.
        """
        ranking, raced = self.ranking(history), self._by_key().keys()
        suspected = possibly_disturbed(ranking)
        unsure = ranking if self.luck > SEARCH_RATIO_ERROR else suspected
        new = [o for o in (*unsure, *history[self.trials :]) if point_key(o.point) not in raced]
        winner = max(filter(allowed, self.ran), key=lambda o: o.rate, default=None)
        may_run = [o for o in ranking if allowed(o) and (o == winner or o in new)]
        fastest = _worth_racing(may_run, self.luck)
        slowed = [o for o in suspected if o in may_run and o not in fastest]
        contenders = _within_time([*fastest, *slowed[:1]], fit, self.luck)
        if len(contenders) < 2:
            return None
        trusted = self.ran if any(o in self.ran for o in contenders) else fastest
        reliable = tuple(o in trusted for o in contenders)
        return Race(tuple(contenders), reliable, _race_cost(contenders, fit(contenders)))

    def with_race(
        self, race: Race, rates: Sequence[Sequence[float]], history: Sequence[Outcome]
    ) -> Reranking:
        """Return this with one more race, given every contender's rates, round by round."""
        corrected = _corrected_rates(race, rates)
        first = not any(outcome in self.ran for outcome in race.contenders)
        error = _observed_ratio_error(race, corrected) if first else SEARCH_RATIO_ERROR
        return self._joined(map(_with_rate, race.contenders, corrected), len(history), error)

    def with_failure(self, outcome: Outcome) -> Reranking:
        """Return this with a recipe that failed in the next race."""
        return self._joined([outcome], self.trials, self.luck)

    def doubted(self, baseline: Outcome, overstated: float) -> Reranking:
        """Return this with the baseline faster by `overstated`, and the search's rates as far off.

        `overstated` is the logarithm of what the search's speedup was too large by.
        """
        corrected = _with_rate(baseline, baseline.rate * math.exp(overstated))
        return self._joined([corrected], self.trials, max(self.luck, overstated))

    def closed(self, history: Sequence[Outcome]) -> Reranking:
        """Return this as it is when no other recipe of the history needs to race."""
        return self._joined([], len(history), SEARCH_RATIO_ERROR)

    def _joined(self, ran: Iterable[Outcome], trials: int, luck: float) -> Reranking:
        raced = self._by_key() | {point_key(o.point): o for o in ran}
        return Reranking(tuple(raced.values()), trials, luck)

    def _by_key(self) -> dict[object, Outcome]:
        return {point_key(o.point): o for o in self.ran}


def _worth_racing(outcomes: Sequence[Outcome], ratio_error: float) -> list[Outcome]:
    """Return the fastest recipes, fastest first, as far as racing them is worth its time."""
    most = _MAX_RECIPES if ratio_error <= SEARCH_RATIO_ERROR else _MAX_RECIPES_IN_DOUBT
    best = sorted(outcomes, key=lambda o: -o.rate)[:most]
    return [o for o in best if o is best[0] or _is_worth_racing(o, best[0], ratio_error)]


def _is_worth_racing(outcome: Outcome, fastest: Outcome, ratio_error: float) -> bool:
    """Return whether this may beat the fastest by enough to be worth the rounds."""
    cost = _race_cost([outcome], together=True)
    gain = _expected_gain(outcome, fastest, ratio_error)
    return gain > GAIN_PER_SECOND * cost.min_seconds


def _expected_gain(outcome: Outcome, fastest: Outcome, ratio_error: float) -> float:
    """Return the expected gain over the fastest, in log throughput."""
    return Prediction(math.log(outcome.rate / fastest.rate), ratio_error).expected_gain(0.0)


def _within_time(
    outcomes: Sequence[Outcome], fit: FitsTogether, ratio_error: float
) -> list[Outcome]:
    """Return the first, with those others that fit the time and have the most expected gain."""
    first, others = outcomes[:1], outcomes[1:]
    sets = [[*first, *few] for n in range(1, len(others) + 1) for few in combinations(others, n)]
    fitting = [few for few in sets if _race_cost(few, fit(few)).min_seconds <= _MAX_SECONDS]

    def total_gain(few: Sequence[Outcome]) -> float:
        return sum(_expected_gain(outcome, few[0], ratio_error) for outcome in few[1:])

    return max(fitting, key=total_gain, default=[])


def _race_cost(contenders: Sequence[Outcome], together: bool) -> RaceCost:
    """Return a race's cost by the search's timings, set up once or before each turn."""
    measured = [o.measurement for o in contenders if o.measurement is not None]
    setups = [m.warmup_seconds for m in measured]
    turns = [max(best_arm.TURN_SECONDS, m.step_seconds) for m in measured]
    if together:
        return RaceCost(sum(setups), tuple(turns))
    return RaceCost(0.0, tuple(map(operator.add, setups, turns)))


def _corrected_rates(race: Race, rates: Sequence[Sequence[float]]) -> list[float]:
    """Return every contender's rate by the rounds, on the scale of the search's reliable rates."""
    leader = rates[best_arm.find_leader(rates)]
    ratios = [paired_ratio(own, leader[: len(own)]).ratio for own in rates]
    known = compress(zip(race.contenders, ratios, strict=True), race.reliable)
    offsets = [math.log(outcome.rate / ratio) for outcome, ratio in known]
    scale = math.exp(sum(offsets) / len(offsets))
    return [scale * ratio for ratio in ratios]


def _observed_ratio_error(race: Race, corrected: Sequence[float]) -> float:
    """Return how far the ratio of two of the search's rates was off, at least the default."""
    known = compress(zip(race.contenders, corrected, strict=True), race.reliable)
    errors = [math.log(rate / outcome.rate) for outcome, rate in known]
    if len(errors) < 2:
        return SEARCH_RATIO_ERROR
    return max(SEARCH_RATIO_ERROR, math.sqrt(2) * stdev(errors))


def _with_rate(outcome: Outcome, rate: float) -> Outcome:
    """Return the outcome at another rate; the difference counts as the machine's drift."""
    assert outcome.measurement is not None
    return replace(outcome, drift=outcome.measurement.samples_per_second / rate)
