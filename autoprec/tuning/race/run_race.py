"""The race: the search's fastest recipes in alternation with the baseline, before any is proven.

A proof takes as long as a search, so the recipe proven first should be the fastest one indeed, and
what it would be replaced by if it fails should be known. The fastest recipe runs without each of
its settings, too, and in float32: which of them is chosen is decided by the same rounds. How fast
the choice is, the confirmation's rounds tell.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import replace

from autoprec.core.device.policies import Refusal
from autoprec.core.recipe import Recipe
from autoprec.core.speed.assumptions import SPEED
from autoprec.core.speed.race import find_contenders, ranking
from autoprec.core.speed.rounds import who_runs_on
from autoprec.core.speed.selection import Finalist, finalist_of
from autoprec.core.speed.space import point_key
from autoprec.core.speed.trial_results import Outcome, Status
from autoprec.tuning.events import Stage
from autoprec.tuning.job import TuningJob
from autoprec.tuning.race.ablations import Ablations
from autoprec.tuning.race.interleaved_timing import (
    TimedRounds,
    time_interleaved,
)
from autoprec.tuning.race.sessions import FinalistFailed, raise_baseline_failed
from autoprec.tuning.stage_results import SearchResult
from autoprec.tuning.study.notes import RACE, KeptRace
from autoprec.tuning.study.study import Study
from autoprec.tuning.time_limit import SEARCH_SHARE
from autoprec.tuning.trials import Trials
from autoprec.workers.runner import Runner, raise_unrelated


def run_race(
    job: TuningJob,
    study: Study,
    search: SearchResult,
    runner: Runner,
    share: float = SEARCH_SHARE,
) -> SearchResult:
    """Race the recipes that may be the fastest; return the search with what the rounds told.

    It ends when a `share` of the time limit has passed. A tuning that was stopped after its race
    and has searched nothing since does not race again.
    """
    searched = tuple(outcome.rate for outcome in search.trials.history)
    kept = study.recall(RACE)
    if kept is not None and kept.searched == searched:
        finalists = [finalist_of(recipe, kept.measured[recipe.key()]) for recipe in kept.recipes]
        return replace(
            search,
            ranking=kept.ranking,
            finalists=tuple(finalists),
            measured=kept.measured,
            refusals=kept.refusals,
        )
    found = _race(job, search, runner, share)
    if found.finalists:
        recipes = tuple(finalist.recipe for finalist in found.finalists)
        kept = KeptRace(searched, found.ranking, recipes, found.measured, found.refusals)
        study.remember(RACE, kept)
    return found


def _race(job: TuningJob, search: SearchResult, runner: Runner, share: float) -> SearchResult:
    """Race; return the search with what the rounds told.

    A recipe that fails is refused, and the others race without it. Raises where the baseline fails.
    Where no time is left, or nothing but the baseline ran, the search's order holds.
    """
    refusals: list[Refusal] = []
    left_out: list[Recipe] = []
    while not job.deadline.passed(share):
        contenders, beside = _racers(job, search, left_out, share)
        if not contenders:
            break
        own = [search.trials.space.recipe(each.point) for each in contenders]
        recipes = [search.baseline, *own, *beside]
        job.listener(Stage("reranking", "the fastest recipes in alternation"))
        try:
            timed = time_race(job, recipes, search.trials, runner, share)
        except FinalistFailed as lost:
            raise_unrelated(lost.failure)
            if lost.recipe.key() == search.baseline.key():
                raise_baseline_failed(lost)
            if lost.recipe in own:
                reason = f"ran before but failed during the comparison with others: {lost}"
                search = _without(search, contenders[own.index(lost.recipe)], reason)
                refusals.append(Refusal(lost.recipe.policy.value, reason))
            left_out.append(lost.recipe)
            continue
        ranked = ranking(
            search.ranking or search.trials.history,
            search.baseline_outcome,
            contenders,
            timed.finalists[: 1 + len(own)],
        )
        search = replace(search, ranking=ranked, finalists=timed.finalists, measured=timed.measured)
        break
    return replace(search, refusals=(*search.refusals, *refusals))


def _racers(
    job: TuningJob, search: SearchResult, left_out: Sequence[Recipe], share: float
) -> tuple[list[Outcome], list[Recipe]]:
    """Return the contenders, and what runs beside them, as many as have time for three rounds.

    The first contender needs its rivals: without them it could not be chosen by these rounds.
    """
    contenders, ablations = _contenders(job, search), Ablations(job, search)
    if not contenders:
        return [], []
    own = [search.trials.space.recipe(each.point) for each in contenders]
    rivals = [each for each in ablations.rivals(own[0]) if each not in left_out]
    order = [search.baseline, own[0], *rivals, *(each for each in own[1:] if each not in rivals)]
    racing = ablations.in_time(order, share, new_processes=False)
    found = [outcome for outcome, recipe in zip(contenders, own, strict=True) if recipe in racing]
    return found, [each for each in rivals if each not in own and each in racing]


def _contenders(job: TuningJob, search: SearchResult) -> tuple[Outcome, ...]:
    baseline = point_key(search.baseline_point)

    def allowed(outcome: Outcome) -> bool:
        policies = job.options.policies
        chosen = not policies or outcome.point["policy"] in policies
        return chosen and point_key(outcome.point) != baseline

    history = search.ranking or search.trials.history
    share = search.trials.space.batch_share
    return find_contenders(history, allowed, new_processes=job.on_cpu, batch_share=share)


def _without(search: SearchResult, lost: Outcome, reason: str) -> SearchResult:
    """Return the search with a recipe that failed since."""
    gone = replace(lost, status=Status.CRASHED, measurement=None, reason=reason)
    ranked = search.ranking or search.trials.history
    return replace(search, ranking=tuple(gone if each is lost else each for each in ranked))


def time_race(
    job: TuningJob,
    recipes: Sequence[Recipe],
    trials: Trials,
    runner: Runner,
    share: float,
) -> TimedRounds:
    """Time the baseline, which comes first, and its rivals, for as long as that is worth it.

    It ends before this share of the time limit has passed.
    """
    last = time.monotonic()

    def running(finalists: Sequence[Finalist]) -> Collection[int]:
        nonlocal last
        now = time.monotonic()
        took, last = now - last, now
        took = max(took, SPEED.turn_seconds * len(finalists))
        on = who_runs_on([each.rates for each in finalists[1:]], took)
        return (0, *(1 + index for index in on)) if on else ()

    return time_interleaved(
        job,
        recipes,
        SPEED.most_rounds,
        trials,
        runner,
        running,
        until=share,
        new_processes=False,
    )
