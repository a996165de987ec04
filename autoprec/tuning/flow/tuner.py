"""The tuning, stage by stage: preflight, search, race, proof, confirmation, profile.

Each stage returns a frozen result, which the stages after it read. What a stage learned is kept in
the study as well, so that a stopped tuning resumes where it stopped. Decisions are core's; the
workers measure.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from autoprec.backends.protocol import DeviceMemory
from autoprec.core.dtypes import Policy
from autoprec.core.profile import Profile
from autoprec.core.recipe import Recipe
from autoprec.core.recipe_words import name_recipe
from autoprec.tuning.confirmation.choice import confirm
from autoprec.tuning.events import Finished, Note, Profiled, Stage
from autoprec.tuning.flow.final_study import write_final_study
from autoprec.tuning.flow.preflight import load_task, run_preflight
from autoprec.tuning.flow.rounded_vocabulary import measure_rounding
from autoprec.tuning.job import TuningJob
from autoprec.tuning.profile.builder import build_profile
from autoprec.tuning.proof.duration import seconds_to_keep_free
from autoprec.tuning.proof.order import is_float16_next, replace_finalist, run_proofs
from autoprec.tuning.proof.prover import Prover
from autoprec.tuning.race.run_race import run_race
from autoprec.tuning.search.goodput import search_at_goodput
from autoprec.tuning.search.run_search import first_answer, run_search
from autoprec.tuning.search.samplers import sampler_of
from autoprec.tuning.stage_results import (
    ConfirmationResult,
    FinalistLost,
    PreflightResult,
    ProofResult,
    SearchResult,
    TuningResult,
)
from autoprec.tuning.study.device_lock import lock_devices
from autoprec.tuning.study.notes import RESULT, TASK_PATH, StoredProfile
from autoprec.tuning.study.storage import default_journal
from autoprec.tuning.study.study import Study, study_name
from autoprec.tuning.time_limit import SEARCH_SHARE, SECOND_SEARCH_SHARE, Deadline
from autoprec.workers.cpu_contention import warn_of_other_users
from autoprec.workers.failures import WorkerFailure
from autoprec.workers.runner import Runner
from autoprec.workers.task_digest import source_digest
from autoprec.workers.task_file import present_policy

#: What a quick answer searches for: with start, first step and probe it comes in half a minute.
QUICK_SEARCH_SECONDS = 15.0


def tune(job: TuningJob) -> Profile:
    """Tune; return the profile. What was learned is kept, however the tuning ends."""
    began = time.monotonic()
    job, digest = with_present_policy(job), source_digest(job.task)
    with lock(job):
        job = with_deadline(job)
        with contextlib.ExitStack() as closing:
            runner = closing.enter_context(job.runner())
            if not job.task.plain:  # what it is, only running it tells
                job, digest = _start(job, runner)
            study = closing.enter_context(contextlib.closing(_open_study(job, digest)))
            stored = study.recall(RESULT)
            finished = stored is not None and stored.limits == repr(job.options.limits())
            if job.task.plain and (job.target.unusable or not finished):
                job, _ = _start(job, runner)
            if stored is not None and finished:
                job.listener(
                    Finished(stored.profile, study.history(), study.location, from_study=True)
                )
                return stored.profile
            job, preflight = _prepare(job, study, runner)
            result = _tune_after_preflight(job, study, preflight, runner)
            if job.options.explain:
                _profile(job, result.confirmation.choice.recipe, runner)
            _tell_start_ups(job)
        profile = build_profile(job, result, digest=digest, seconds=time.monotonic() - began)
        write_final_study(study, result, profile)
        study.remember(RESULT, StoredProfile(profile, repr(job.options.limits())))
    job.listener(Finished(profile, result.trials.history, study.location))
    return profile


def answer_quickly(job: TuningJob) -> str:
    """Search for some seconds; say which recipe leads. The trials are kept, for `tune`, too."""
    limit = min(job.options.search_limit or QUICK_SEARCH_SECONDS, QUICK_SEARCH_SECONDS)
    job = with_deadline(replace(job, options=replace(job.options, search_limit=limit)))
    with lock(job), job.runner() as runner:
        job, digest = _start(job, runner)
        with contextlib.closing(_open_study(job, digest)) as study:
            job, preflight = _prepare(job, study, runner)
            found = run_search(job, study, preflight, runner)
            return first_answer(found, job.options.policies)


def _start(job: TuningJob, runner: Runner) -> tuple[TuningJob, str]:
    """Load the task in a worker; return the job with the device's memory known, and the digest."""
    what = "running the script up to its training" if job.task.script else "loading the task"
    job.listener(Stage("start", f"{what} in a worker"))
    loaded = load_task(job, runner)
    return with_memory(job, loaded.memory), source_digest(job.task, loaded.fingerprint)


def _tell_start_ups(job: TuningJob) -> None:
    """Say what running the user's script or function anew in every worker has cost."""
    if not job.task.plain and job.start_ups:
        each, count = sum(job.start_ups) / len(job.start_ups), len(job.start_ups)
        workers = "its worker" if count == 1 else f"each of {count} workers, some at the same time"
        job.listener(Note(f"its own start took {each:.1f} s in {workers}"))


def lock(job: TuningJob) -> AbstractContextManager[None]:
    """Hold the job's devices; see `lock_devices`."""
    return lock_devices(
        [each.identity for each in job.devices],
        wait=job.options.wait,
        folder=Path(tempfile.gettempdir()),
        on_wait=lambda text: job.listener(Note(text)),
    )


def _prepare(job: TuningJob, study: Study, runner: Runner) -> tuple[TuningJob, PreflightResult]:
    """Describe task and device; return the job with what later workers need to know of them."""
    preflight = run_preflight(job, study, runner)
    job = replace(job, surveyed=preflight.task.surveyed)
    runner.settings = job.settings()
    return job, preflight


def _tune_after_preflight(
    job: TuningJob, study: Study, preflight: PreflightResult, runner: Runner
) -> TuningResult:
    """Search, race, prove and confirm; search on with float16 where bfloat16 is refused."""
    prover = Prover(job, study, preflight, runner)
    search = _search(job, study, preflight, prover, runner)
    proof = run_proofs(job, preflight, search, prover)
    confirmation = None
    if not is_float16_next(search, proof):
        proof, confirmation = _confirm(job, search, proof, prover, runner)
    chosen = None if confirmation is None else confirmation.choice.recipe
    if is_float16_next(search, proof, chosen) and not job.deadline.passed(SECOND_SEARCH_SHARE):
        job.listener(Note("no recipe of mixed_bfloat16 passes and gains: mixed_float16 is tried"))
        preflight = replace(preflight, space=replace(preflight.space, float16_waits=False))
        search = _search(job, study, preflight, prover, runner, search)
        spent = proof.seconds
        proof = run_proofs(job, preflight, search, prover)
        proof, confirmation = replace(proof, seconds=spent + proof.seconds), None
    if confirmation is None:
        proof, confirmation = _confirm(job, search, proof, prover, runner)
    rounded = measure_rounding(job, preflight, confirmation.choice.recipe, runner)
    contention = job.contention_monitor.worst
    said = "" if rounded is None or preflight.rehearsed else rounded.text
    return TuningResult(preflight, search, proof, confirmation, contention, said)


def _search(
    job: TuningJob,
    study: Study,
    preflight: PreflightResult,
    prover: Prover,
    runner: Runner,
    earlier: SearchResult | None = None,
) -> SearchResult:
    """Search, at the batch that is wanted, and race what was found; `earlier`: search on."""
    found = run_search(job, study, preflight, runner, earlier)
    found = search_at_goodput(job, study, found, prover.noise_scale, runner)
    job.listener(Note(first_answer(found, job.options.policies)))
    share = SEARCH_SHARE if earlier is None else SECOND_SEARCH_SHARE
    history, space = found.trials.history, found.trials.space
    needed = seconds_to_keep_free(history, space, evaluated=preflight.task.has_evaluate)
    raced = run_race(job, study, found, runner, job.deadline.share_before(share, needed))
    prover.take(raced)
    return raced


def _profile(job: TuningJob, recipe: Recipe, runner: Runner) -> None:
    """Report which operators take the time of the chosen recipe's step."""
    job.listener(Stage("profile", f"one update of {name_recipe(recipe)}"))
    try:
        operators = runner.call("operator_times", recipe=recipe, seed=job.options.seed)
    except WorkerFailure as failure:
        job.listener(Note(f"the operators could not be profiled: {failure.message[:200]}"))
    else:
        if operators:
            job.listener(Profiled(recipe, operators))


def _confirm(
    job: TuningJob,
    search: SearchResult,
    proof: ProofResult,
    prover: Prover,
    runner: Runner,
) -> tuple[ProofResult, ConfirmationResult]:
    """Confirm the fastest of the proven recipes; a smaller one replaces a finalist that fails."""
    confirmation = confirm(job, search, proof, runner)
    while isinstance(confirmation, FinalistLost):
        proof = replace_finalist(proof, confirmation, search, prover)
        confirmation = confirm(job, search, proof, runner, confirmation)
    return proof, confirmation


def with_deadline(job: TuningJob) -> TuningJob:
    """Return the job with the deadline of its time limit, counted from now."""
    limit = job.options.time_limit
    if limit is None:
        return job
    return replace(job, deadline=Deadline(time.monotonic(), limit, time.monotonic))


def with_present_policy(job: TuningJob) -> TuningJob:
    """Return the job with the policy of its task's present training, if the file alone says it.

    Float32 is what everything is compared with anyway, and none of its own.
    """
    task = job.task
    policy = job.options.baseline or (present_policy(task.path) if task.plain else None)
    named = None if policy is Policy.FLOAT32 else policy
    return replace(job, options=replace(job.options, baseline=named))


def with_memory(job: TuningJob, memory: DeviceMemory | None) -> TuningJob:
    """Return the job with the accelerator's memory known; warn of other users of the device."""
    said = warn_of_other_users(memory) if memory is not None else ""
    if said:
        job.listener(Note(said, warning=True))
    return replace(job, memory=memory)


def _open_study(job: TuningJob, digest: str) -> Study:
    name = study_name(
        job.task.path.stem,
        digest,
        job.target.facts.fingerprint,
        job.target.software,
        job.options.identity(),
        *(() if job.checkpoint is None else (job.checkpoint,)),
    )
    storage = job.options.storage or default_journal(job.task.path)
    sampler_of(job.options.sampler, job.options.seed)  # refused before anything is measured
    study = Study(storage, name, fresh=job.options.fresh)
    path = str(job.task.path.resolve())
    if study.recall(TASK_PATH) != path:
        study.remember(TASK_PATH, path)
    return study
