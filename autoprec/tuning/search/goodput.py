"""The batch of the most goodput: found once the gradient's noise is known, then searched at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autoprec.core.number_words import rate_number
from autoprec.core.numerics.noise_scale import NoiseScale
from autoprec.core.recipe import Recipe
from autoprec.core.speed.goodput import goodput_batch
from autoprec.core.speed.space import BATCH, point_key
from autoprec.tuning.events import Note
from autoprec.tuning.job import TuningJob
from autoprec.tuning.search.loop import Search
from autoprec.tuning.stage_results import SearchResult
from autoprec.tuning.study.study import Study
from autoprec.tuning.trials import Trials
from autoprec.workers.runner import Runner


def search_at_goodput(
    job: TuningJob,
    study: Study,
    found: SearchResult,
    noise_scale: Callable[[Recipe], NoiseScale | None],
    runner: Runner,
) -> SearchResult:
    """Search on at the batch of the most goodput, by the gradient noise scale at the baseline.

    Of smaller batches than the baseline's fewer samples train in a second: those are not taken.
    The result has the trials at that batch and the baseline to choose from. Where no batch is to be
    chosen by goodput, or the noise cannot be measured, the search stays as it was `found`.
    """
    space, baseline = found.trials.space, found.baseline_outcome
    free = space.effective_batch is None and len(space.batch_sizes) > 1
    policies = job.options.policies or space.policies
    allowed = [o for o in found.trials.history if o.rate > 0 and o.point["policy"] in policies]
    if job.options.batch != "goodput" or not free or not allowed:
        return found
    scale = noise_scale(found.baseline)
    if scale is None:
        why = "the noise of its gradient could not be measured"
        job.listener(Note(f"the knee is taken for the batch of the most goodput: {why}"))
        return found
    leader = max(allowed, key=lambda outcome: min(outcome.rate, outcome.loader_feeds))
    sizes = [each for each in space.batch_sizes if each >= int(baseline.point[BATCH])]
    size = goodput_batch(sizes, found.trials.history, leader, scale, space.world_size)
    at = "more than can be told" if scale.at is None else f"{rate_number(scale.at)} samples"
    most = f"batch {size * space.world_size} has the most goodput"
    job.listener(Note(f"{most}: the gradient noise scale is {at}"))
    missing, needed = found.not_covered, found.needed_islands
    if job.options.sampler == "cost":
        own = replace(space, batch_sizes=(size,))
        plain = {**found.baseline_point, BATCH: size}
        task = found.trials.task
        search = Search(
            job,
            study,
            own,
            plain,
            task.units,
            spent=found.seconds,
            evaluated=task.has_evaluate,
        )
        search.run(runner)
        space, needed = replace(search.space, batch_sizes=space.batch_sizes), search.needed_islands
        missing = tuple(dict.fromkeys((*missing, *search.not_covered)))
    history, plain_key = study.history(), point_key(baseline.point)
    kept = [o for o in history if o.point[BATCH] == size or point_key(o.point) == plain_key]
    return replace(
        found,
        trials=Trials(found.trials.task, space, history, found.trials.rehearsed),
        ranking=tuple(kept),
        needed_islands=needed,
        noise_scale=scale,
        not_covered=missing,
    )
