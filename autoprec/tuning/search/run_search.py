"""Runs the search: the trials, and the baseline that fits; says which recipe leads after it."""

from __future__ import annotations

from collections.abc import Collection

from autoprec.core.dtypes import Policy
from autoprec.core.number_words import about_times
from autoprec.core.recipe_words import describe_batch_of, describe_recipe
from autoprec.core.speed.feasibility import fitting_baseline
from autoprec.core.speed.space import BATCH, Point, Space, point_key
from autoprec.core.speed.trial_results import Outcome, shortlist
from autoprec.errors import NoFeasibleRecipe, TaskError
from autoprec.tuning.job import TuningJob
from autoprec.tuning.search.loop import Search, outcome_at
from autoprec.tuning.search.task_space import baseline_point
from autoprec.tuning.stage_results import PreflightResult, SearchResult
from autoprec.tuning.study.study import Study
from autoprec.tuning.time_limit import SEARCH_SHARE, SECOND_SEARCH_SHARE
from autoprec.tuning.trials import Trials
from autoprec.workers.runner import Runner


def run_search(
    job: TuningJob,
    study: Study,
    preflight: PreflightResult,
    runner: Runner,
    earlier: SearchResult | None = None,
) -> SearchResult:
    """Search the space; go on from the search that ran `earlier` in this tuning, if one did.

    Raises `NoFeasibleRecipe` where plain float32 does not run, and `TaskError` where its loss is
    not finite.
    """
    space = preflight.space
    requested = baseline_point(space)
    search = Search(
        job,
        study,
        space,
        requested,
        preflight.task.units,
        spent=0.0 if earlier is None else earlier.seconds,
        share=SEARCH_SHARE if earlier is None else SECOND_SEARCH_SHARE,
        evaluated=preflight.task.has_evaluate,
    )
    if earlier is None and not preflight.rehearsed:
        search.measure_since_resume(runner)
    history = search.run(runner)
    baseline = fitting_baseline(space, requested, history) or requested
    _check_baseline(job, baseline, outcome_at(history, baseline))
    return SearchResult(
        trials=Trials(preflight.task, search.space, history, preflight.rehearsed),
        baseline_point=baseline,
        needed_islands=search.needed_islands,
        notes=_notes(space, requested, baseline),
        refusals=() if earlier is None else earlier.refusals,
        not_covered=search.not_covered,
        seconds=search.seconds,
    )


def _notes(space: Space, requested: Point, baseline: Point) -> tuple[str, ...]:
    if baseline == requested:
        return ()
    recipe = space.recipe(baseline)
    return (
        f"the baseline does not fit at batch {requested[BATCH]}: it is taken at "
        f"{describe_batch_of(recipe)}",
    )


def _check_baseline(job: TuningJob, baseline: Point, outcome: Outcome | None) -> None:
    """Raise where the baseline did not run, or where its loss is not finite."""
    if outcome is None or outcome.rate <= 0:
        why = f"{outcome.status}: {outcome.reason}" if outcome is not None else "no trial ran"
        raise NoFeasibleRecipe(
            f"the baseline does not run ({why}); give a smaller batch: BATCH_SIZE "
            "in a task file, the loader's in a script, or `batch_sizes`"
        )
    if outcome.measurement is not None and not outcome.measurement.finite:
        raise TaskError(
            f"{job.task.name}: in float32 the loss became inf or NaN within the first steps at "
            f"batch {baseline[BATCH]}, so nothing can be compared with it. Look for inf or NaN in "
            "the data after the first batch, or lower the learning rate"
        )


def first_answer(search: SearchResult, policies: Collection[Policy] = ()) -> str:
    """Say which recipe leads after the search, and about how fast it is.

    Only `policies` may be chosen, any where there are none.
    """
    trials, baseline = search.trials, search.baseline_outcome
    found = search.ranking or trials.history
    allowed = [o for o in found if not policies or o.point["policy"] in policies]
    leading = shortlist(allowed, trials.space, count=1)
    if not leading:
        return "so far: none of the policies that were asked for has run"
    leader, recipe = leading[0], trials.space.recipe(leading[0].point)
    name = describe_recipe(recipe, trials.task.weights_in)
    if trials.rehearsed:
        return f"so far: {name}; how fast that is cannot be said of a pretended device"
    alike = point_key({**leader.point, "policy": Policy.FLOAT32.value})
    plain = next((o.rate for o in trials.history if point_key(o.point) == alike), 0.0)
    said = []
    if plain and plain != leader.rate:
        like_it = f"{Policy.FLOAT32.name_with(trials.task.weights_in)} like it"
        said.append(f"about {about_times(leader.rate / plain)} as fast as {like_it}")
    if recipe.effective_batch != search.baseline.effective_batch or not plain:
        ratio = about_times(leader.rate / baseline.rate)
        said.append(f"about {ratio} the samples/s of {describe_batch_of(search.baseline)}")
    how_fast = " and ".join(said) or f"the fastest of {len(trials.history)} tried"
    return (
        f"so far: {name}, {how_fast}, by a short timing; neither compared in turns nor checked "
        "against float32 yet"
    )
