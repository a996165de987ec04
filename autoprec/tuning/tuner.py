"""The tuning, stage by stage: preflight, search, proof, confirmation, profile.

Each stage returns a frozen result, which the stages after it read. What a stage learned is kept in
the study as well, so that a stopped tuning resumes where it stopped. Decisions are core's; the
workers measure.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from autoprec.backends.protocol import DeviceMemory
from autoprec.core.numerics.reference_recipe import is_exact
from autoprec.core.profile import Profile
from autoprec.core.recipe import Recipe
from autoprec.core.recipe_words import name_recipe
from autoprec.core.speed.trial_results import shortlist
from autoprec.tuning.confirmation.interleaved_timing import may_share_worker
from autoprec.tuning.confirmation.search_comparison import overstated
from autoprec.tuning.confirmation.stage import confirm
from autoprec.tuning.events import Finished, Note, Profiled, Stage
from autoprec.tuning.final_study import write_final_study
from autoprec.tuning.job import TuningJob
from autoprec.tuning.preflight import load_task, run_preflight
from autoprec.tuning.profile.builder import build_profile
from autoprec.tuning.proof.stage import replace_finalist, run_proofs
from autoprec.tuning.proof.stored_verdicts import Prover
from autoprec.tuning.search.reranking_rounds import doubt_search
from autoprec.tuning.search.stage import run_search
from autoprec.tuning.stage_results import (
    ConfirmationResult,
    FinalistLost,
    PreflightResult,
    ProofResult,
    SearchResult,
    TuningResult,
)
from autoprec.tuning.study.device_lock import lock_devices
from autoprec.tuning.study.kept_tunings import RESULT, TASK_PATH, StoredProfile
from autoprec.tuning.study.places import default_journal
from autoprec.tuning.study.study import Study, study_name
from autoprec.tuning.time_limit import SEARCH_SHARE, Deadline
from autoprec.workers.cpu_contention import warn_of_other_users
from autoprec.workers.failures import WorkerFailure
from autoprec.workers.prestart import PrestartedRunners
from autoprec.workers.runner import Runner
from autoprec.workers.task_digest import task_digest

#: A worker starts during the proof where the memory limit holds this many times the baseline's
#: memory.
_PRESTART_MEMORY_MULTIPLE = 4


def tune(job: TuningJob) -> Profile:
    """Tune; return the profile. What was learned is kept, however the tuning ends."""
    began = time.monotonic()
    digest = task_digest(job.task)
    with lock_devices(
        [each.identity for each in job.devices],
        wait=job.options.wait,
        folder=Path(tempfile.gettempdir()),
        on_wait=lambda text: job.listener(Note(text)),
    ):
        job = with_deadline(job)
        study = _open_study(job, digest)
        stored = study.recall(RESULT, StoredProfile)
        finished = stored is not None and stored.limits == repr(job.options.limits())
        with contextlib.closing(study), job.runner() as runner:
            if job.target.unusable or not finished:
                job.listener(Stage("start", "loading the task in a worker"))
                job = with_memory(job, load_task(job, runner).memory)
            if stored is not None and finished:
                job.listener(
                    Finished(stored.profile, study.history(), study.location, from_study=True)
                )
                return stored.profile
            preflight = run_preflight(job, study, runner)
            job = replace(job, surveyed=preflight.task.surveyed)
            runner.settings = job.settings()
            result = _tune_after_preflight(job, study, preflight, runner)
            if job.options.explain:
                _profile(job, result.confirmation.choice.recipe, runner)
        profile = build_profile(job, result, digest=digest, seconds=time.monotonic() - began)
        write_final_study(study, result, profile)
        study.remember(RESULT, StoredProfile(profile, repr(job.options.limits())))
    job.listener(Finished(profile, result.trials.history, study.location))
    return profile


def _tune_after_preflight(
    job: TuningJob, study: Study, preflight: PreflightResult, runner: Runner
) -> TuningResult:
    """Search, prove and confirm; search once more where the confirmation belies the search.

    Whatever slowed the baseline in the search may have slowed what it took for too slow.
    """
    search = run_search(job, study, preflight, runner)
    prover = Prover(job, study, preflight, runner)
    with PrestartedRunners(job.runner, search.baseline) as make_runner:
        if _should_prestart(job, search):
            make_runner.start()
        proof = run_proofs(job, preflight, search, prover)
        proof, confirmation = _confirm(job, search, proof, prover, runner, make_runner)
        log_ratio = overstated(search, proof, confirmation)
        if log_ratio and not job.deadline.passed(SEARCH_SHARE):
            job.listener(Note(_explain_second_search(log_ratio)))
            doubt_search(study, search.baseline_outcome, log_ratio)
            search = search.continued(run_search(job, study, preflight, runner))
            again = run_proofs(job, preflight, search, prover, proof)
            if again.fastest.recipe.key() != proof.fastest.recipe.key():
                again, confirmation = _confirm(job, search, again, prover, runner, make_runner)
            proof = again
    contention = job.contention_monitor.worst
    return TuningResult(preflight, search, proof, confirmation, contention)


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


def _explain_second_search(log_ratio: float) -> str:
    return (
        f"the search saw {math.exp(log_ratio):.2g} times the speed-up that was confirmed: "
        "what seemed slower to it is compared once more"
    )


def _confirm(
    job: TuningJob,
    search: SearchResult,
    proof: ProofResult,
    prover: Prover,
    runner: Runner,
    make_runner: Callable[[], Runner],
) -> tuple[ProofResult, ConfirmationResult]:
    """Confirm the fastest of the proven recipes; a smaller one replaces a finalist that fails."""
    confirmation = confirm(job, search, proof, runner, make_runner)
    while isinstance(confirmation, FinalistLost):
        proof = replace_finalist(proof, confirmation, search, prover)
        confirmation = confirm(job, search, proof, runner, make_runner, confirmation)
    return proof, confirmation


def _should_prestart(job: TuningJob, search: SearchResult) -> bool:
    """Say whether the confirmation will need a worker for the baseline that can start by then.

    It starts during a proof, if there is one, and where there is memory for it.
    """
    trials, baseline = search.trials, search.baseline
    needed = _PRESTART_MEMORY_MULTIPLE * trials.peak_memory_of(baseline)
    fits = job.memory_bytes is None or needed <= job.memory_bytes
    alone = job.on_cpu and not may_share_worker(baseline, trials.task.framework)
    fastest = shortlist(search.ranking, trials.space, count=1)
    return fits and alone and not is_exact(trials.space.recipe(fastest[0].point))


def with_deadline(job: TuningJob) -> TuningJob:
    """Return the job with the deadline of its time limit, counted from now."""
    limit = job.options.time_limit
    return job if limit is None else replace(job, deadline=Deadline(time.monotonic(), limit))


def with_memory(job: TuningJob, memory: DeviceMemory | None) -> TuningJob:
    """Return the job with the accelerator's memory known; warn of other users of the device."""
    said = warn_of_other_users(memory) if memory is not None else ""
    if said:
        job.listener(Note(said, warning=True))
    return replace(job, memory=memory)


def _open_study(job: TuningJob, digest: str) -> Study:
    name = study_name(
        job.task.stem,
        digest,
        job.target.facts.fingerprint,
        job.target.software,
        job.options.identity(),
        *(() if job.checkpoint is None else (job.checkpoint,)),
    )
    storage = job.options.storage or default_journal(job.task)
    study = Study(storage, name, fresh=job.options.fresh)
    path = str(job.task.resolve())
    if study.recall(TASK_PATH, str) != path:
        study.remember(TASK_PATH, path)
    return study
