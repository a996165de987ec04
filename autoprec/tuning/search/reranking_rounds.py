"""Re-ranks the search's fastest recipes by interleaved timing, before any of them is proven.

A proof takes as long as a search, so the recipe proven first should be the fastest one indeed. Core
decides which recipes run and what their rounds mean; here they are run. The baseline is left out:
the confirmation measures every finalist against it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from autoprec.core.device.policies import Refusal
from autoprec.core.speed.reranking import MAX_ROUNDS, Race, Reranking
from autoprec.core.speed.selection import Finalist
from autoprec.core.speed.space import Point, point_key
from autoprec.core.speed.trial_results import Outcome, Status
from autoprec.tuning.confirmation.interleaved_timing import (
    TimedRounds,
    fit_in_memory_together,
    time_interleaved,
)
from autoprec.tuning.confirmation.sessions import FinalistFailed
from autoprec.tuning.events import Stage
from autoprec.tuning.job import TuningJob
from autoprec.tuning.search.trials import Measured, Trials
from autoprec.tuning.study.study import Study
from autoprec.tuning.time_limit import SEARCH_SHARE
from autoprec.workers.runner import Runner, raise_unrelated

#: The re-ranking's name in the files of studies; another one would lose those there are.
_STUDY_KEY = "heats"


def recall_reranking(study: Study) -> Reranking:
    """Return the re-ranking that an earlier run of this tuning kept, or an empty one."""
    return study.recall(_STUDY_KEY, Reranking) or Reranking()


def forget_reranking(study: Study) -> None:
    """Forget what an earlier run kept, because its trials no longer count."""
    study.remember(_STUDY_KEY, Reranking())


def doubt_search(study: Study, baseline: Outcome, overstated: float) -> None:
    """Keep by how much the search overstated the speedup: what seemed too slow races once more."""
    study.remember(_STUDY_KEY, recall_reranking(study).doubted(baseline, overstated))


@dataclass(frozen=True)
class RerankingResult:
    """The re-ranking so far; `measured` and `refusals` are those of the last race alone."""

    reranking: Reranking
    measured: Measured = field(default_factory=dict)
    refusals: tuple[Refusal, ...] = ()


def rerank(
    job: TuningJob,
    study: Study,
    baseline: Point,
    trials: Trials,
    before: Reranking,
    runner: Runner,
) -> RerankingResult:
    """Time the recipes that may be the fastest; return `before` where it covers them already."""
    space, history = trials.space, trials.history

    def allowed(outcome: Outcome) -> bool:
        policies = job.options.policies
        chosen = not policies or outcome.point["policy"] in policies
        return outcome.rate > 0 and chosen and point_key(outcome.point) != point_key(baseline)

    def fit(outcomes: Sequence[Outcome]) -> bool:
        return fit_in_memory_together(job, [space.recipe(o.point) for o in outcomes], trials)

    if job.deadline.passed(SEARCH_SHARE):
        return RerankingResult(before)
    reranking, refusals = before, list[Refusal]()
    measured: Measured = {}
    while race := reranking.next_race(history, allowed, fit):
        try:
            timed = _run(job, race, trials, runner)
        except FinalistFailed as failed:
            raise_unrelated(failed.failure)
            reason = f"ran before but failed during the comparison with others: {failed}"
            refusals.append(Refusal(failed.recipe.policy.value, reason))
            lost = failed.recipe.key()
            out = next(o for o in race.contenders if space.recipe(o.point).key() == lost)
            gone = replace(out, status=Status.CRASHED, measurement=None, reason=reason)
            reranking = reranking.with_failure(gone)
        else:
            rates = [finalist.rates for finalist in timed.finalists]
            reranking, measured = reranking.with_race(race, rates, history), timed.measured
            break
    else:
        reranking = reranking.closed(history)
    study.remember(_STUDY_KEY, reranking)
    return RerankingResult(reranking, measured, tuple(refusals))


def _run(job: TuningJob, race: Race, trials: Trials, runner: Runner) -> TimedRounds:
    """Run one race."""
    job.listener(Stage("reranking", "the fastest recipes in alternation"))

    def still_running(finals: Sequence[Finalist]) -> Collection[int]:
        if job.deadline.passed(SEARCH_SHARE):
            return ()
        return race.cost.select_contenders([final.rates for final in finals])

    recipes = [trials.space.recipe(outcome.point) for outcome in race.contenders]
    return time_interleaved(job, recipes, MAX_ROUNDS, trials, runner, still_running)
