"""The heats: the search's fastest recipes measured anew, in alternation, before any is proven.

The search times a recipe once, each at another moment, and machines drift by more than the fastest
recipes differ by. A proof takes as long as a search, so what is proven first should be what is
really the fastest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoprec.core.choice import Finalist
from autoprec.core.rules import Refusal
from autoprec.core.search import Outcome, Status, key
from autoprec.core.space import Space
from autoprec.core.statistics import paired_ratio
from autoprec.tuning.contest import ROUND_SECONDS, FinalistFailed
from autoprec.tuning.events import Stage
from autoprec.tuning.evidence import Findings
from autoprec.tuning.finish import contest_among
from autoprec.tuning.study import Study
from autoprec.tuning.trials import raise_user_error
from autoprec.tuning.work import Work

#: Who runs: at most this many, and nobody below this share of the fastest one's speed.
_MOST, _NEAR = 4, 0.88

#: Rounds, and the seconds they may take together; where fewer fit, the search's word stands.
_ROUNDS, _FEWEST, _SECONDS = 7, 3, 40.0


@dataclass(frozen=True)
class Heats:
    """The search's outcomes as the heats left them, as they are kept in the study."""

    ranking: tuple[Outcome, ...]


def rank(work: Work, study: Study, space: Space, findings: Findings) -> tuple[Outcome, ...]:
    """The history, with the rates of the fastest recipes as they are in alternation."""
    kept = study.recall("heats", Heats)
    if kept is not None and _of(kept.ranking, findings.history):
        return kept.ranking
    ranking = list(findings.history)
    while True:
        running = _fastest(ranking, work)
        if len(running) < 2:
            return tuple(ranking)
        seconds = [o.measurement.step_seconds for o in running if o.measurement is not None]
        rounds = min(_ROUNDS, int(_SECONDS / sum(max(ROUND_SECONDS, 4 * s) for s in seconds)))
        if rounds < _FEWEST:
            return tuple(ranking)
        work.listener(Stage("heats", "the fastest recipes in alternation"))
        recipes = [space.recipe(outcome.point) for outcome in running]
        try:
            finals = contest_among(work, recipes, seconds, rounds, findings)
        except FinalistFailed as failed:
            raise_user_error(failed.failure)
            out = next(o for o in running if space.recipe(o.point).key() == failed.recipe.key())
            reason = f"ran before but failed in the heats: {failed}"
            findings.refusals.append(Refusal(failed.recipe.policy.value, reason))
            ranking[ranking.index(out)] = replace(
                out, status=Status.CRASHED, measurement=None, reason=reason
            )
            continue
        for outcome, rate in zip(running, _rates(running, finals), strict=True):
            ranking[ranking.index(outcome)] = _at(outcome, rate)
        study.remember("heats", Heats(tuple(ranking)))
        return tuple(ranking)


def _of(ranking: Sequence[Outcome], history: Sequence[Outcome]) -> bool:
    """Whether a kept ranking is of this history."""
    return [key(o.point) for o in ranking] == [key(o.point) for o in history]


def _fastest(outcomes: Sequence[Outcome], work: Work) -> list[Outcome]:
    """The fastest recipes that may be chosen, fastest first."""
    allowed = [
        o
        for o in outcomes
        if o.rate > 0 and (not work.options.policies or o.point["policy"] in work.options.policies)
    ]
    best = sorted(allowed, key=lambda o: -o.rate)[:_MOST]
    return [o for o in best if o.rate >= _NEAR * best[0].rate]


def _rates(running: Sequence[Outcome], finals: Sequence[Finalist]) -> list[float]:
    """Everybody's rate by the rounds, on the scale of the search's rates."""
    ratios = [paired_ratio(final.rates, finals[0].rates).ratio for final in finals]
    offsets = [math.log(o.rate / ratio) for o, ratio in zip(running, ratios, strict=True)]
    scale = math.exp(sum(offsets) / len(offsets))
    return [scale * ratio for ratio in ratios]


def _at(outcome: Outcome, rate: float) -> Outcome:
    """The outcome with another rate: what it was measured at was the machine's drift."""
    assert outcome.measurement is not None
    return replace(outcome, drift=outcome.measurement.samples_per_second / rate)
