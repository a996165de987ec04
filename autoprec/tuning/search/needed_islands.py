"""Finds the modules that a policy cannot run without in float32, after its first trial raised.

So a policy whose plain recipe raises is searched with those modules in float32, as the only way to
run it, and the proof begins with them. What was found is kept in the study, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from autoprec.core.measurement import Unit
from autoprec.core.numerics.reference_recipe import rounds_everywhere
from autoprec.core.numerics.runnable import RunAttempt
from autoprec.core.recipe import Recipe
from autoprec.core.speed.space import Space
from autoprec.core.speed.timing_budget import TimingBudget
from autoprec.errors import UserCodeError
from autoprec.tuning.events import Note, Stage
from autoprec.tuning.job import TuningJob
from autoprec.tuning.proof.island_search import name_modules, product_share, search_runnable
from autoprec.tuning.stage_results import NeededIslands
from autoprec.tuning.study.notes import NEEDED_ISLANDS
from autoprec.tuning.study.study import Study
from autoprec.workers.failures import FailureKind, WorkerFailure
from autoprec.workers.runner import Runner, raise_device_lost


def recall_needed(study: Study, space: Space) -> dict[str, NeededIslands]:
    """Return what the study holds of policies that do not run as they are."""
    known = {each.value: study.recall(NEEDED_ISLANDS.of(each.value)) for each in space.policies}
    return {policy: needed for policy, needed in known.items() if needed is not None}


def with_needed_islands(space: Space, needed: Mapping[str, NeededIslands]) -> Space:
    """Return the space with what policies were found to need."""
    islands = {policy: each.paths for policy, each in needed.items()}
    return replace(space, islands=islands) if islands else space


def may_need_islands(recipe: Recipe) -> bool:
    """Return whether a recipe that raised is its policy by itself, which islands may repair."""
    plain = recipe.memory_format == "contiguous" and not recipe.alignment.modules
    return recipe.policy.mixed and plain and not recipe.compile and not rounds_everywhere(recipe)


def find_needed_islands(
    job: TuningJob,
    study: Study,
    runner: Runner,
    units: Sequence[Unit],
    recipe: Recipe,
    *,
    problem: str,
    budget: TimingBudget,
    out_of_time: Callable[[], bool],
) -> str:
    """Find the modules that a recipe's policy cannot run without in float32, and keep them.

    `problem` is what it raised in a trial of this `budget`: later batches may be the first to
    raise. What was found goes into the study. Returns why nothing was; "" otherwise.
    """
    first_line = problem.partition("\n")[0]
    job.listener(Stage("islands", f"{recipe.policy} raises in the task's own code: {first_line}"))

    def run(paths: tuple[str, ...]) -> RunAttempt:
        kept = replace(recipe, float32_modules=(*recipe.float32_modules, *paths))
        try:
            runner.call("measure", recipe=kept, seed=job.options.seed, budget=budget)
        except WorkerFailure as failure:
            raise_device_lost(failure)
            told = failure.kind in (FailureKind.USER_ERROR, FailureKind.UNSUPPORTED)
            return RunAttempt(paths, ran=False, raised_in=failure.raised_in if told else ())
        return RunAttempt(paths, ran=True)

    try:
        found = search_runnable(units, run, out_of_time=out_of_time)
    except UserCodeError as error:  # whatever comes next loads it anew, and ends the tuning
        runner.drop()
        return f"then the task could not be loaded: {error}"
    if not found.paths:
        return found.reason
    reason = f"it does not run without {name_modules(found.paths)} in float32: {first_line}"
    needed = NeededIslands(found.paths, found.attempts, reason, product_share(units, found.paths))
    study.remember(NEEDED_ISLANDS.of(recipe.policy.value), needed)
    job.listener(Note(f"{recipe.policy} runs with {name_modules(found.paths)} kept in float32"))
    return ""
