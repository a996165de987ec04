"""Who runs in the heats, and what their rounds say of the search's rates.

The search times a recipe once, each at another moment, and machines drift by more than the fastest
recipes differ by. So the fastest run anew, in alternation, before any is proven. Beside them runs
one that was slower than all others foresee, if there is one: a neighbour may have taken what is
missing.

What the heats mend may make the search want another recipe after all (the batch beside one that was
slowed, say). So the search is asked again, and what it then measures runs against the winner. So
does, once, what seemed too slow to run, where the search's timings turn out to be worse than taken
for: on a machine whose neighbours come and go, a recipe may have met them alone.
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
from autoprec.core.speed.trial_results import Outcome, key, suspects
from autoprec.core.statistics import paired_ratio

LUCK = 0.1
"""How far the ratio of two recipes in the search may be off, as a logarithm, for all that is known.

Each was timed once, for half a second, and the fastest of many was often only the luckiest.
"""

ROUNDS = 20
"""The most rounds."""

#: Who runs: at most this many, and nobody who promises less than the price of the fewest rounds.
_MOST = 5

#: Seconds that making ready and the rounds may take, as the search timed the steps. Where the
#: fewest that decide do not fit, fewer recipes run, and where that leaves nobody to compare, the
#: search's word stands.
_SECONDS = 30.0

Fit = Callable[[Sequence[Outcome]], bool]
"""Whether the memory suffices for all of these at once."""


@dataclass(frozen=True)
class Pace:
    """Seconds that it takes to make everybody ready once, and each one's turn."""

    ready: float
    turns: tuple[float, ...]

    @property
    def fewest_seconds(self) -> float:
        """What the fewest rounds that decide take."""
        return self.ready + best_arm.FEWEST * sum(self.turns)

    def still_running(self, rates: Sequence[Sequence[float]]) -> Collection[int]:
        """Who runs another round: nobody when the race is over or the time is."""
        spent = sum(len(own) * turn for own, turn in zip(rates, self.turns, strict=True))
        return best_arm.still_running(rates, self.turns) if self.ready + spent < _SECONDS else ()


@dataclass(frozen=True)
class Heat:
    """Who runs, whether the search's rate of each is sure (those set the scale), and the pace."""

    running: tuple[Outcome, ...]
    sure: tuple[bool, ...]
    pace: Pace


@dataclass(frozen=True)
class Heats:
    """Who ran in the heats, at the rate they came to or failed, as it is kept in the study.

    `trials` is how many the search had made by then, `luck` how far its ratios may be off.
    """

    ran: tuple[Outcome, ...] = ()
    trials: int = 0
    luck: float = LUCK

    def ranking(self, history: Sequence[Outcome]) -> tuple[Outcome, ...]:
        """The history, with everybody who ran here as they came out."""
        own = self._own()
        return tuple(own.get(key(o.point), o) for o in history)

    def mended(self, history: Sequence[Outcome]) -> tuple[Outcome, ...]:
        """What the search may learn from: the ranking, but that who failed here ran alone."""
        return tuple(
            measured if ranked.rate <= 0 else ranked
            for measured, ranked in zip(history, self.ranking(history), strict=True)
        )

    def next_heat(
        self, history: Sequence[Outcome], allowed: Callable[[Outcome], bool], fit: Fit
    ) -> Heat | None:
        """The next heat, of those `allowed`; none where nobody may be faster than the winner.

        It is the winner's, against who did not run yet: newcomers, and who may be as fast.
        """
        ranking, known = self.ranking(history), self._own().keys()
        suspected = suspects(ranking)
        doubtful = ranking if self.luck > LUCK else suspected
        new = [o for o in (*doubtful, *history[self.trials :]) if key(o.point) not in known]
        may_run = [o for o in ranking if allowed(o) and (self._won(o) or o in new)]
        fastest = _fastest(may_run, self.luck)
        slowed = [o for o in suspected if o in may_run and o not in fastest]
        running = _within_time([*fastest, *slowed[:1]], fit, self.luck)
        if len(running) < 2:
            return None
        known_rates = self.ran if any(o in self.ran for o in running) else fastest
        sure = tuple(o in known_rates for o in running)
        return Heat(tuple(running), sure, _pace(running, fit(running)))

    def finished(
        self, heat: Heat, rates: Sequence[Sequence[float]], history: Sequence[Outcome]
    ) -> Heats:
        """These heats and one more, of which these are everybody's rates, round by round."""
        came_to = _came_to(heat, rates)
        first = not any(outcome in self.ran for outcome in heat.running)
        luck = _luck(heat, came_to) if first else LUCK
        return self._joined(map(_at, heat.running, came_to), len(history), luck)

    def failed(self, outcome: Outcome) -> Heats:
        """These heats and one who failed in the next."""
        return self._joined([outcome], self.trials, self.luck)

    def nobody_else(self, history: Sequence[Outcome]) -> Heats:
        """These heats, after which nobody else of the history runs."""
        return self._joined([], len(history), LUCK)

    def _won(self, outcome: Outcome) -> bool:
        return outcome == max(self.ran, key=lambda o: o.rate, default=None)

    def _joined(self, ran: Iterable[Outcome], trials: int, luck: float) -> Heats:
        own = self._own() | {key(o.point): o for o in ran}
        return Heats(tuple(own.values()), trials, luck)

    def _own(self) -> dict[object, Outcome]:
        return {key(o.point): o for o in self.ran}


def _fastest(outcomes: Sequence[Outcome], luck: float) -> list[Outcome]:
    """The fastest recipes, fastest first, as far as to run them is worth it."""
    best = sorted(outcomes, key=lambda o: -o.rate)[:_MOST]
    return [o for o in best if o is best[0] or _promises(o, best[0], luck)]


def _promises(outcome: Outcome, fastest: Outcome, luck: float) -> bool:
    """Whether this may be so much faster than the fastest that the rounds are worth it."""
    pace = _pace([outcome], together=True)
    return _gain(outcome, fastest, luck) > best_arm.PRICE * pace.fewest_seconds


def _gain(outcome: Outcome, fastest: Outcome, luck: float) -> float:
    """What this is expected to be faster by, in log throughput."""
    return Prediction(math.log(outcome.rate / fastest.rate), luck).expected_gain(0.0)


def _within_time(outcomes: Sequence[Outcome], fit: Fit, luck: float) -> list[Outcome]:
    """The first, and of the others those that promise most together and have the time to run."""
    first, others = outcomes[:1], outcomes[1:]
    sets = [[*first, *few] for n in range(1, len(others) + 1) for few in combinations(others, n)]
    fitting = [few for few in sets if _pace(few, fit(few)).fewest_seconds <= _SECONDS]
    return max(fitting, key=lambda few: sum(_gain(o, few[0], luck) for o in few[1:]), default=[])


def _pace(running: Sequence[Outcome], together: bool) -> Pace:
    """What these take as the search timed them, made ready once or for each turn."""
    measured = [o.measurement for o in running if o.measurement is not None]
    ready = [m.warmup_seconds for m in measured]
    turns = [max(best_arm.TURN_SECONDS, m.step_seconds) for m in measured]
    if together:
        return Pace(sum(ready), tuple(turns))
    return Pace(0.0, tuple(map(operator.add, ready, turns)))


def _came_to(heat: Heat, rates: Sequence[Sequence[float]]) -> list[float]:
    """Everybody's rate by the rounds, on the scale of the search's rates that are sure."""
    of = rates[best_arm.leader(rates)]
    ratios = [paired_ratio(own, of[: len(own)]).ratio for own in rates]
    known = compress(zip(heat.running, ratios, strict=True), heat.sure)
    offsets = [math.log(outcome.rate / ratio) for outcome, ratio in known]
    scale = math.exp(sum(offsets) / len(offsets))
    return [scale * ratio for ratio in ratios]


def _luck(heat: Heat, came_to: Sequence[float]) -> float:
    """How far the ratio of two of the search's rates was off, at least what is taken for it."""
    known = compress(zip(heat.running, came_to, strict=True), heat.sure)
    errors = [math.log(rate / outcome.rate) for outcome, rate in known]
    return max(LUCK, math.sqrt(2) * stdev(errors)) if len(errors) > 1 else LUCK


def _at(outcome: Outcome, rate: float) -> Outcome:
    """The outcome with another rate: what it was measured at was the machine's drift."""
    assert outcome.measurement is not None
    return replace(outcome, drift=outcome.measurement.samples_per_second / rate)
