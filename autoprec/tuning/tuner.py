"""The tuning, stage by stage: preflight, search, re-ranking, proof, finish, profile.

`tune` is the whole story; every stage reads what the ones before it learned, and what a stage
learned is kept in the study, so that a stopped tuning goes on where it stopped. Decisions are
core's; measuring is the workers'.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from autoprec.backends.protocol import DeviceMemory
from autoprec.core.device.facts import DeviceFacts
from autoprec.core.device.policies import Proposal, Refusal, propose
from autoprec.core.dtypes import Policy
from autoprec.core.measurement import TaskFacts
from autoprec.core.profile import Profile
from autoprec.core.recipe import Recipe
from autoprec.core.speed.acquisition import fitting_baseline
from autoprec.core.speed.kept_memory import clearly_pays
from autoprec.core.speed.space import BATCH, Point, Space
from autoprec.core.speed.trial_results import MAY_BE_FASTEST_SHARE, Outcome, Status, shortlist
from autoprec.errors import NoFeasibleRecipe, TaskError
from autoprec.tuning.confirmation import Confirmation
from autoprec.tuning.events import Described, Finished, Note, Stage, Started
from autoprec.tuning.interleaved_timing import may_share_worker
from autoprec.tuning.job import TuningJob
from autoprec.tuning.preflight import (
    baseline_point,
    build_space,
    load_task,
    padding_multiples,
    preflight,
    refusals_for_task,
    refuse_absent_tf32,
)
from autoprec.tuning.profile_builder import Findings, ProvenRecipe, build_profile
from autoprec.tuning.proof_stage import Prover, is_reference, keeps_arithmetic
from autoprec.tuning.reranking import recall_reranking, rerank
from autoprec.tuning.search_loop import Search, outcome_at
from autoprec.tuning.study import Study, study_name
from autoprec.tuning.study_storage import DeviceLock, default_journal
from autoprec.tuning.time_limit import PROOF_SHARE, Deadline
from autoprec.workers.cpu_contention import warn_of_other_users
from autoprec.workers.prestart import PrestartedRunners
from autoprec.workers.runner import Runner
from autoprec.workers.task_file import task_digest

#: A worker starts beside the proof where the budget holds this many times the baseline's memory.
_PRESTART_MEMORY_MULTIPLE = 4

#: Below this share of the fastest proven recipe's speed no proof is spent: the search's own errors
#: are a few per cent.
_MIN_SPEED_SHARE = 0.85


@dataclass(frozen=True)
class Result:
    """A finished tuning as it is kept in the study, with the limits it was finished under."""

    profile: Profile
    limits: str


def tune(job: TuningJob) -> Profile:
    """Tune; return the profile. What was learned is kept, however the tuning ends."""
    began = time.monotonic()
    digest = task_digest(job.task)
    folder = Path(tempfile.gettempdir())
    with DeviceLock(
        job.target.facts.identity,
        wait=job.options.wait,
        folder=folder,
        on_wait=lambda text: job.listener(Note(text)),
    ):
        job = with_deadline(job)
        study = _open_study(job, digest)
        kept = study.recall("result", Result)
        finished = kept is not None and kept.limits == repr(job.options.limits())
        with job.runner() as runner:
            if job.target.unusable or not finished:
                job.listener(Stage("start", "loading the task in a worker"))
                job = with_memory(job, load_task(job, runner).memory)
            if kept is not None and finished:
                job.listener(
                    Finished(kept.profile, study.history(), study.location, from_study=True)
                )
                return kept.profile
            task = preflight(job, study, runner)
            facts, proposal = _measure_device(job, study)
            job.listener(Started(str(job.task), facts, proposal, study.location))
            findings = _learn(job, study, facts, proposal, task, runner)
        profile = build_profile(
            findings,
            task_file=job.task.name,
            digest=digest,
            checkpoint=job.checkpoint,
            forced=not job.float32_allowed,
            seconds=time.monotonic() - began,
        )
        study.remember("result", Result(profile, repr(job.options.limits())))
    job.listener(Finished(profile, findings.history, study.location))
    return profile


def with_deadline(job: TuningJob) -> TuningJob:
    """The work with the moment at which its time limit ends, counted from now."""
    limit = job.options.time_limit
    return job if limit is None else replace(job, deadline=Deadline(time.monotonic(), limit))


def with_memory(job: TuningJob, memory: DeviceMemory | None) -> TuningJob:
    """The work with the accelerator's memory known, and others on the device told of."""
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
    return Study(storage, name, fresh=job.options.fresh)


def _measure_device(job: TuningJob, study: Study) -> tuple[DeviceFacts, Proposal]:
    facts = study.recall("facts", DeviceFacts)
    if facts is None:
        job.listener(Stage("probe", "timing this device's matrix products"))
        known = job.target.facts
        facts = job.target.measure(known)
        for note in facts.notes[len(known.notes) :]:
            job.listener(Note(note, warning=True))
        study.remember("facts", facts)
    refuse_absent_tf32(job, facts)
    return facts, propose(facts, job.options.policies)


def _learn(
    job: TuningJob,
    study: Study,
    facts: DeviceFacts,
    proposal: Proposal,
    task: TaskFacts,
    runner: Runner,
) -> Findings:
    space = build_space(job, task, facts, proposal)
    study.set_space(space, sampler=job.options.sampler, seed=job.options.seed)
    job.listener(Described(task, len(study.history()), len(space.points())))
    findings = Findings(
        facts=facts,
        task=task,
        history=(),
        refusals=[*proposal.refusals, *refusals_for_task(job, task)],
        memory_bytes=job.memory_bytes,
        space=space,
        alignment=min(padding_multiples(job, facts, space.policies), default=1),
    )
    settled = _search(job, study, space, findings, runner)
    prover = Prover(job, study, task, findings, runner)

    def substitute(failed: Recipe) -> ProvenRecipe | None:
        found = _prove_at_smaller_batch(failed, space, prover, findings)
        prover.forget()
        return found

    plain = space.recipe(settled)
    with PrestartedRunners(job.runner, plain) as spares:
        if _should_prestart(job, space, plain, findings):
            spares.start()
        proven = _prove(job, space, prover, findings)
        prover.forget()

        def memory_pays(batch_size: int) -> bool:
            return clearly_pays(space, settled, findings.history, batch_size)

        Confirmation(job, runner, plain, findings, spares, memory_pays).run(proven, substitute)
    findings.neighbours = job.contention_monitor.worst
    return findings


def _search(
    job: TuningJob, study: Study, space: Space, findings: Findings, runner: Runner
) -> Point:
    """Search and re-rank until that brings nothing new; return the baseline."""
    baseline = baseline_point(space)
    search = Search(job, study, space, baseline)
    if not findings.rehearsed:
        search.measure_since_resume(runner)
    reranking = recall_reranking(study)
    while True:
        findings.history = search.run(runner, reranking)
        settled = fitting_baseline(space, baseline, findings.history) or baseline
        measured = outcome_at(findings.history, settled)
        if measured is None or measured.rate <= 0:
            raise _baseline_error(measured)
        if measured.measurement is not None and not measured.measurement.finite:
            raise _nonfinite_error(job, settled)
        further = rerank(job, study, space, settled, findings, reranking, runner)
        if further == reranking:
            break
        reranking = further
    if search.time_limit_reached:
        findings.not_covered.append("recipes that the search did not come to")
    findings.ranking = reranking.ranking(findings.history)
    if settled != baseline:
        findings.notes.append(
            f"plain float32 does not fit at batch {baseline[BATCH]}: the baseline is batch "
            f"{settled[BATCH]}"
        )
    return settled


def _should_prestart(job: TuningJob, space: Space, plain: Recipe, findings: Findings) -> bool:
    """Whether the finish will want a worker of the baseline's own, and it can start by then.

    That is beside a proof, and where there is memory for it.
    """
    budget = job.memory_bytes
    room = budget is None or _PRESTART_MEMORY_MULTIPLE * findings.peak_of(plain) <= budget
    alone = job.on_cpu and not may_share_worker(plain, findings.task.framework)
    fastest = shortlist(findings.ranking, space, count=1)
    return room and alone and not is_reference(space.recipe(fastest[0].point))


def _baseline_error(outcome: Outcome | None) -> NoFeasibleRecipe:
    why = f"{outcome.status}: {outcome.reason}" if outcome is not None else "no trial ran"
    return NoFeasibleRecipe(
        f"plain float32 does not run at its baseline ({why}); give a smaller BATCH_SIZE or "
        "smaller --batch-sizes"
    )


def _nonfinite_error(job: TuningJob, settled: Point) -> TaskError:
    return TaskError(
        f"{job.task.name}: in float32 the loss became inf or NaN within the first steps at batch "
        f"{settled[BATCH]}, so nothing can be proven against it. Look for inf or NaN in the data "
        "after the first batch, or lower the learning rate"
    )


def _prove(job: TuningJob, space: Space, prover: Prover, findings: Findings) -> list[ProvenRecipe]:
    """Prove the fastest recipe of every policy that may be chosen and could win, fastest first.

    A proof costs as much as the search, so what is clearly slower than a recipe that passed is not
    proven.
    """
    found: list[ProvenRecipe] = []
    allowed = job.options.policies or space.policies
    floor = _best_rate(findings, Policy.FLOAT32) if job.float32_allowed else 0.0
    for policy in sorted(space.policies, key=lambda p: -_best_rate(findings, p)):
        if policy not in allowed:
            continue
        own = findings.of(policy.value)
        best = shortlist(own, space, count=1)
        if not best:
            findings.refusals.append(Refusal(policy.value, _why_none_measured(own)))
            continue
        if policy is not Policy.FLOAT32 and best[0].rate < MAY_BE_FASTEST_SHARE * floor:
            seen = (
                "slower than" if findings.rehearsed else f"{best[0].rate / floor:.2g}x the speed of"
            )
            reason = f"measured {seen} the best float32 recipe"
            findings.refusals.append(Refusal(policy.value, reason))
            continue
        if job.deadline.passed(PROOF_SHARE) and not is_reference(space.recipe(best[0].point)):
            findings.refusals.append(Refusal(policy.value, "no time was left to prove it"))
            findings.not_covered.append(f"the proof of {policy}")
            continue
        leader = max((p.rate for p in found), default=0.0)
        near = [
            o
            for o in _candidates(own, space, findings)
            if o.rate >= MAY_BE_FASTEST_SHARE * best[0].rate
        ]
        plain = shortlist(
            [o for o in own if keeps_arithmetic(space.recipe(o.point))], space, count=1
        )
        passed = _prove_candidates(near, space, prover, leader)
        if not passed:  # what a compiler or a knob broke, the policy by itself may not
            passed = _prove_candidates([o for o in plain if o not in near], space, prover, leader)
        found += passed
    if not found:
        reasons = "; ".join(f"{r.candidate}: {r.reason}" for r in findings.refusals)
        raise NoFeasibleRecipe(
            f"no policy that was asked for passes ({reasons}). Add float32 to --policies, or "
            "accept what trains differently with --accept-drift"
        )
    return found


def _candidates(own: Sequence[Outcome], space: Space, findings: Findings) -> tuple[Outcome, ...]:
    """The fastest of one policy: one where the re-ranking decided it, two where it could not."""
    return shortlist(own, space, count=1 if findings.ranking != findings.history else 2)


def _prove_candidates(
    outcomes: Sequence[Outcome], space: Space, prover: Prover, leader: float
) -> list[ProvenRecipe]:
    """Prove these, but for those that are clearly slower than the fastest proven recipe."""
    worth = [o for o in outcomes if o.rate >= _MIN_SPEED_SHARE * leader]
    proofs = [prover.prove(space.recipe(o.point), o, space) for o in worth]
    return [proven for proven in proofs if proven is not None]


def _prove_at_smaller_batch(
    failed: Recipe, space: Space, prover: Prover, findings: Findings
) -> ProvenRecipe | None:
    """Prove the fastest recipe of the same policy at a smaller batch than the one that failed."""
    own = findings.of(failed.policy.value)
    best = shortlist([o for o in own if int(o.point[BATCH]) < failed.batch_size], space, count=1)
    return prover.prove(space.recipe(best[0].point), best[0], space) if best else None


def _best_rate(findings: Findings, policy: Policy) -> float:
    return max((outcome.rate for outcome in findings.of(policy.value)), default=0.0)


def _why_none_measured(own: list[Outcome]) -> str:
    failed = [o for o in own if o.status is not Status.OK]
    if not failed:
        return "the search ended before it was tried"
    return f"{failed[0].status}: {failed[0].reason}"
