"""The heats: the search's fastest recipes measured anew, in alternation, before any is proven.

The search times a recipe once, each at another moment, and machines drift by more than the fastest
recipes differ by. A proof takes as long as a search, so what is proven first should be what is
really the fastest. Beside them runs one that was slower than all others foresee, if there is one: a
neighbour may have taken what is missing. The baseline does not run here: the finish measures
everybody against it.

What they mend may make the search want another recipe after all (the batch beside one that was
slowed, say). So the search is asked again, and what it then measures runs against the winner. So
does, once, what seemed too slow to run, where the search's timings turn out to be worse than taken
for: on a machine whose neighbours come and go, a recipe may have met them alone.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, compress
from statistics import stdev

from autoprec.core import race
from autoprec.core.choice import Finalist
from autoprec.core.cost import Prediction
from autoprec.core.outcomes import Outcome, Status, key, suspects
from autoprec.core.race import FEWEST
from autoprec.core.rules import Refusal
from autoprec.core.space import Point, Space
from autoprec.core.statistics import paired_ratio
from autoprec.tuning.contest import TURN_SECONDS, FinalistFailed, contest_among, fit_together
from autoprec.tuning.events import Stage
from autoprec.tuning.evidence import Findings
from autoprec.tuning.study import Study
from autoprec.tuning.trials import Runner, raise_user_error
from autoprec.tuning.work import Work

#: Who runs: at most this many, and nobody who promises less than the price of the fewest rounds.
_MOST = 5

LUCK = 0.1
"""How far the ratio of two recipes in the search may be off, as a logarithm, for all that is known.

Each was timed once, for half a second, and the fastest of many was often only the luckiest.
"""

#: Seconds that making ready and the rounds may take, as the search timed the steps, and the most
#: rounds. Where the fewest that decide do not fit, fewer recipes run, and where that leaves nobody
#: to compare, the search's word stands.
_SECONDS, _ROUNDS = 30.0, 20


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

    def won(self, outcome: Outcome) -> bool:
        """Whether this is the fastest of who ran."""
        return outcome == max(self.ran, key=lambda o: o.rate, default=None)

    def may_run(self, history: Sequence[Outcome]) -> list[Outcome]:
        """The winner, and who did not run yet: newcomers, and who may be as fast after all."""
        ranking, known = self.ranking(history), self._own().keys()
        doubtful = ranking if self.luck > LUCK else suspects(ranking)
        wanted = (*doubtful, *history[self.trials :])
        return [o for o in ranking if self.won(o) or (o in wanted and key(o.point) not in known)]

    def joined(self, ran: Sequence[Outcome], trials: int, luck: float = LUCK) -> Heats:
        """These heats and further ones."""
        own = self._own() | {key(o.point): o for o in ran}
        return Heats(tuple(own.values()), trials, luck)

    def _own(self) -> dict[object, Outcome]:
        return {key(o.point): o for o in self.ran}


def known_heats(study: Study) -> Heats:
    """What an earlier run of this tuning has kept."""
    return study.recall("heats", Heats) or Heats()


def run_heats(
    work: Work,
    study: Study,
    space: Space,
    baseline: Point,
    findings: Findings,
    before: Heats,
    runner: Runner,
) -> Heats:
    """Run who may be the fastest of the history; return `before` where nobody else may be."""
    heats = before
    while True:
        may_run = heats.may_run(findings.history)
        allowed = [o for o in may_run if _may_be_chosen(o, work) and key(o.point) != key(baseline)]
        fastest = _fastest(allowed, heats.luck)
        suspected = suspects(heats.ranking(findings.history))
        doubtful = [o for o in suspected if o in allowed and o not in fastest]

        def pace_of(outcomes: Sequence[Outcome]) -> _Pace:
            own = [space.recipe(outcome.point) for outcome in outcomes]
            return _pace(outcomes, fit_together(work, own, findings))

        running = _within_time([*fastest, *doubtful[:1]], pace_of, heats.luck)
        if len(running) < 2:
            heats = heats.joined((), len(findings.history))
            break
        recipes, pace = [space.recipe(outcome.point) for outcome in running], pace_of(running)
        work.listener(Stage("heats", "the fastest recipes in alternation"))
        try:
            finals = contest_among(work, recipes, _ROUNDS, findings, runner, pace.still_running)
        except FinalistFailed as failed:
            raise_user_error(failed.failure)
            out = next(o for o in running if space.recipe(o.point).key() == failed.recipe.key())
            reason = f"ran before but failed in the heats: {failed}"
            findings.refusals.append(Refusal(failed.recipe.policy.value, reason))
            gone = replace(out, status=Status.CRASHED, measurement=None, reason=reason)
            heats = heats.joined([gone], heats.trials, heats.luck)
            continue
        winners = [outcome in before.ran for outcome in running]
        sure = winners if any(winners) else [outcome in fastest for outcome in running]
        rates = _rates(running, sure, finals)
        luck = LUCK if any(winners) else _luck(running, sure, rates)
        heats = heats.joined(list(map(_at, running, rates)), len(findings.history), luck)
        break
    study.remember("heats", heats)
    return heats


def _may_be_chosen(outcome: Outcome, work: Work) -> bool:
    policies = work.options.policies
    return outcome.rate > 0 and (not policies or outcome.point["policy"] in policies)


def _fastest(outcomes: Sequence[Outcome], luck: float) -> list[Outcome]:
    """The fastest recipes, fastest first, as far as to run them is worth it."""
    best = sorted(outcomes, key=lambda o: -o.rate)[:_MOST]
    return [o for o in best if o is best[0] or _promises(o, best[0], luck)]


def _promises(outcome: Outcome, fastest: Outcome, luck: float) -> bool:
    """Whether this may be so much faster than the fastest that the rounds are worth it."""
    pace = _pace([outcome], together=True)
    return _gain(outcome, fastest, luck) > race.PRICE * pace.fewest_seconds


def _gain(outcome: Outcome, fastest: Outcome, luck: float) -> float:
    """What this is expected to be faster by, in log throughput."""
    return Prediction(math.log(outcome.rate / fastest.rate), luck).expected_gain(0.0)


def _luck(running: Sequence[Outcome], sure: Sequence[bool], rates: Sequence[float]) -> float:
    """How far the ratio of two of the search's rates was off, at least what is taken for it."""
    known = compress(zip(running, rates, strict=True), sure)
    errors = [math.log(rate / outcome.rate) for outcome, rate in known]
    return max(LUCK, math.sqrt(2) * stdev(errors)) if len(errors) > 1 else LUCK


def _within_time(
    outcomes: Sequence[Outcome], pace_of: Callable[[Sequence[Outcome]], _Pace], luck: float
) -> list[Outcome]:
    """The first, and of the others those that promise most together and have the time to run."""
    first, others = outcomes[:1], outcomes[1:]
    sets = [[*first, *few] for n in range(1, len(others) + 1) for few in combinations(others, n)]
    fitting = [few for few in sets if pace_of(few).fewest_seconds <= _SECONDS]
    return max(fitting, key=lambda few: sum(_gain(o, few[0], luck) for o in few[1:]), default=[])


@dataclass(frozen=True)
class _Pace:
    """Seconds that it takes to make everybody ready once, and each one's turn."""

    ready: float
    turns: tuple[float, ...]

    @property
    def fewest_seconds(self) -> float:
        """What the fewest rounds that decide take."""
        return self.ready + FEWEST * sum(self.turns)

    def still_running(self, finals: Sequence[Finalist]) -> Collection[int]:
        """Who runs another round: nobody when the race is over or the time is."""
        rates = [final.rates for final in finals]
        spent = sum(len(own) * turn for own, turn in zip(rates, self.turns, strict=True))
        return race.still_running(rates, self.turns) if self.ready + spent < _SECONDS else ()


def _pace(running: Sequence[Outcome], together: bool) -> _Pace:
    """What these take as the search timed them, made ready once or for each turn."""
    measured = [o.measurement for o in running if o.measurement is not None]
    ready = [m.warmup_seconds for m in measured]
    turns = [max(TURN_SECONDS, m.step_seconds) for m in measured]
    if together:
        return _Pace(sum(ready), tuple(turns))
    return _Pace(0.0, tuple(map(operator.add, ready, turns)))


def _rates(
    running: Sequence[Outcome], sure: Sequence[bool], finals: Sequence[Finalist]
) -> list[float]:
    """Everybody's rate by the rounds, on the scale of the search's rates that it is `sure` of."""
    rates = [final.rates for final in finals]
    of = rates[race.leader(rates)]
    ratios = [paired_ratio(own, of[: len(own)]).ratio for own in rates]
    known = compress(zip(running, ratios, strict=True), sure)
    offsets = [math.log(outcome.rate / ratio) for outcome, ratio in known]
    scale = math.exp(sum(offsets) / len(offsets))
    return [scale * ratio for ratio in ratios]


def _at(outcome: Outcome, rate: float) -> Outcome:
    """The outcome with another rate: what it was measured at was the machine's drift."""
    assert outcome.measurement is not None
    return replace(outcome, drift=outcome.measurement.samples_per_second / rate)
