"""Re-ranks the search's fastest recipes by interleaved timing, before any of them is proven.

A proof takes as long as a search, so the recipe proven first should be the fastest one indeed. Core
decides which recipes run and what their rounds mean; here they are run. The baseline is left out:
the confirmation measures every finalist against it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from autoprec.core.device.policies import Refusal
from autoprec.core.speed.reranking import MAX_ROUNDS, Race, Reranking
from autoprec.core.speed.selection import Finalist
from autoprec.core.speed.space import Point, Space, point_key
from autoprec.core.speed.trial_results import Outcome, Status
from autoprec.tuning.events import Stage
from autoprec.tuning.interleaved_timing import (
    FinalistFailed,
    fit_in_memory_together,
    time_interleaved,
)
from autoprec.tuning.job import TuningJob
from autoprec.tuning.profile_builder import Findings
from autoprec.tuning.study import Study
from autoprec.tuning.time_limit import SEARCH_SHARE
from autoprec.workers.runner import Runner, raise_device_lost


def recall_reranking(study: Study) -> Reranking:
    """Return the re-ranking that an earlier run of this tuning kept, or an empty one."""
    return study.recall("heats", Reranking) or Reranking()


def rerank(
    job: TuningJob,
    study: Study,
    space: Space,
    baseline: Point,
    findings: Findings,
    before: Reranking,
    runner: Runner,
) -> Reranking:
    """Time the recipes that may be the fastest; return `before` where it covers them already."""

    def allowed(outcome: Outcome) -> bool:
        policies = job.options.policies
        chosen = not policies or outcome.point["policy"] in policies
        return outcome.rate > 0 and chosen and point_key(outcome.point) != point_key(baseline)

    def fit(outcomes: Sequence[Outcome]) -> bool:
        return fit_in_memory_together(job, [space.recipe(o.point) for o in outcomes], findings)

    reranking, history = before, findings.history
    if job.deadline.passed(SEARCH_SHARE):
        return before
    while race := reranking.next_race(history, allowed, fit):
        try:
            rates = _run(job, space, race, findings, runner)
        except FinalistFailed as failed:
            raise_device_lost(failed.failure)
            reason = f"ran before but failed when it ran beside the others: {failed}"
            findings.refusals.append(Refusal(failed.recipe.policy.value, reason))
            lost = failed.recipe.key()
            out = next(o for o in race.contenders if space.recipe(o.point).key() == lost)
            gone = replace(out, status=Status.CRASHED, measurement=None, reason=reason)
            reranking = reranking.with_failure(gone)
        else:
            reranking = reranking.with_race(race, rates, history)
            break
    else:
        reranking = reranking.closed(history)
    study.remember("heats", reranking)
    return reranking


def _run(
    job: TuningJob, space: Space, race: Race, findings: Findings, runner: Runner
) -> list[tuple[float, ...]]:
    """Run one race; return each recipe's rates, round by round."""
    job.listener(Stage("heats", "the fastest recipes in alternation"))

    def still_running(finals: Sequence[Finalist]) -> Collection[int]:
        if job.deadline.passed(SEARCH_SHARE):
            return ()
        return race.cost.select_contenders([final.rates for final in finals])

    recipes = [space.recipe(outcome.point) for outcome in race.contenders]
    finals = time_interleaved(job, recipes, MAX_ROUNDS, findings, runner, still_running)
    return [final.rates for final in finals]
