"""The heats: the search's fastest recipes measured anew, in alternation, before any is proven.

The search times a recipe once, each at another moment, and machines drift by more than the fastest
recipes differ by. A proof takes as long as a search, so what is proven first should be what is
really the fastest. Beside them runs one that was slower than all others foresee, if there is one: a
neighbour may have taken what is missing. The baseline does not run here: the finish measures
everybody against it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoprec.core.choice import SAME_SPEED, Finalist
from autoprec.core.outcomes import Outcome, Status, key, suspects
from autoprec.core.rules import Refusal
from autoprec.core.space import Point, Space
from autoprec.core.statistics import paired_ratio
from autoprec.tuning.contest import TURN_SECONDS, FinalistFailed, contest_among, fit_together
from autoprec.tuning.events import Stage
from autoprec.tuning.evidence import Findings
from autoprec.tuning.study import Study
from autoprec.tuning.trials import Runner, raise_user_error
from autoprec.tuning.work import Work

#: Who runs: at most this many, and nobody below this share of the fastest one's speed. The second
#: may be further behind: the fastest of many trials was often only the luckiest.
_MOST, _NEAR, _SECOND = 3, 0.85, 0.8

#: Rounds, and the seconds that these and making ready may take; where fewer fit, fewer run, and
#: where that leaves nobody to compare, the search's word stands.
_ROUNDS, _FEWEST, _SECONDS = 7, 3, 15.0


@dataclass(frozen=True)
class Heats:
    """The search's outcomes as the heats left them, as they are kept in the study."""

    ranking: tuple[Outcome, ...]


def rank(
    work: Work, study: Study, space: Space, baseline: Point, findings: Findings, runner: Runner
) -> tuple[Outcome, ...]:
    """The history, with the rates of the fastest recipes as they are in alternation."""
    kept = study.recall("heats", Heats)
    if kept is not None and _of(kept.ranking, findings.history):
        return kept.ranking
    ranking = list(findings.history)
    while True:
        allowed = [o for o in ranking if _may_be_chosen(o, work) and key(o.point) != key(baseline)]
        fastest = _fastest(allowed)
        doubtful = [o for o in suspects(ranking) if o in allowed and o not in fastest]
        running = [*fastest, *doubtful[:1]]
        recipes = [space.recipe(outcome.point) for outcome in running]
        while (rounds := _rounds(running, fit_together(work, recipes, findings))) < _FEWEST:
            running.pop()
            recipes.pop()
        if len(running) < 2:
            return tuple(ranking)
        work.listener(Stage("heats", "the fastest recipes in alternation"))
        try:
            finals = contest_among(work, recipes, rounds, findings, runner, _settled)
        except FinalistFailed as failed:
            raise_user_error(failed.failure)
            out = next(o for o in running if space.recipe(o.point).key() == failed.recipe.key())
            reason = f"ran before but failed in the heats: {failed}"
            findings.refusals.append(Refusal(failed.recipe.policy.value, reason))
            ranking[ranking.index(out)] = replace(
                out, status=Status.CRASHED, measurement=None, reason=reason
            )
            continue
        for outcome, rate in zip(running, _rates(fastest, finals), strict=True):
            ranking[ranking.index(outcome)] = _at(outcome, rate)
        study.remember("heats", Heats(tuple(ranking)))
        return tuple(ranking)


def _of(ranking: Sequence[Outcome], history: Sequence[Outcome]) -> bool:
    """Whether a kept ranking is of this history."""
    return [key(o.point) for o in ranking] == [key(o.point) for o in history]


def _may_be_chosen(outcome: Outcome, work: Work) -> bool:
    policies = work.options.policies
    return outcome.rate > 0 and (not policies or outcome.point["policy"] in policies)


def _fastest(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The fastest recipes, fastest first."""
    best = sorted(outcomes, key=lambda o: -o.rate)[:_MOST]
    near = [o for o in best if o.rate >= _NEAR * best[0].rate]
    return near if len(near) > 1 else [o for o in best[:2] if o.rate >= _SECOND * best[0].rate]


def _rounds(running: Sequence[Outcome], together: bool) -> int:
    """How many rounds these can run in the time there is, made ready once or for each turn."""
    measured = [o.measurement for o in running if o.measurement is not None]
    ready = sum(m.warmup_seconds for m in measured)
    turns = sum(max(TURN_SECONDS, m.step_seconds) for m in measured)
    if not turns:
        return _ROUNDS
    rounds = (_SECONDS - ready) / turns if together else _SECONDS / (ready + turns)
    return min(_ROUNDS, int(rounds))


def _settled(finals: Sequence[Finalist]) -> bool:
    """Whether one was the fastest in each of enough rounds, or all are surely equally fast."""
    rounds = list(zip(*(final.rates for final in finals), strict=True))
    if len(rounds) < _FEWEST:
        return False
    ratios = [paired_ratio(final.rates, finals[0].rates) for final in finals]
    one_leads = len({rates.index(max(rates)) for rates in rounds}) == 1
    slowest, fastest = min(r.low for r in ratios), max(r.high for r in ratios)
    return one_leads or slowest >= (1 - SAME_SPEED) * fastest


def _rates(fastest: Sequence[Outcome], finals: Sequence[Finalist]) -> list[float]:
    """Everybody's rate by the rounds, on the scale of the search's rates of the fastest.

    Those come first; behind them may run whose rate the search is in doubt of.
    """
    ratios = [paired_ratio(final.rates, finals[0].rates).ratio for final in finals]
    offsets = [math.log(o.rate / ratio) for o, ratio in zip(fastest, ratios, strict=False)]
    scale = math.exp(sum(offsets) / len(offsets))
    return [scale * ratio for ratio in ratios]


def _at(outcome: Outcome, rate: float) -> Outcome:
    """The outcome with another rate: what it was measured at was the machine's drift."""
    assert outcome.measurement is not None
    return replace(outcome, drift=outcome.measurement.samples_per_second / rate)
