"""The tuning, stage by stage: preflight, search, heats, proof, finish, profile.

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
from autoprec.core.speed.acquisition import settled_baseline
from autoprec.core.speed.kept_memory import surely_pays
from autoprec.core.speed.space import BATCH, Point, Space
from autoprec.core.speed.trial_results import Outcome, Status, shortlist
from autoprec.errors import NoFeasibleRecipe, TaskError
from autoprec.tuning.confirmation import Finish
from autoprec.tuning.context import Work
from autoprec.tuning.events import Described, Finished, Note, Stage, Started
from autoprec.tuning.interleaved_timing import may_share
from autoprec.tuning.preflight import (
    baseline_point,
    build_space,
    load,
    multiples,
    preflight,
    refusals_of,
    refuse_absent_tf32,
)
from autoprec.tuning.profile_builder import Findings, Proven, build_profile
from autoprec.tuning.proof_stage import Prover, is_reference, keeps_arithmetic
from autoprec.tuning.reranking import known_heats, run_heats
from autoprec.tuning.search_loop import Search, find
from autoprec.tuning.study import Study, study_name
from autoprec.tuning.study_storage import DeviceLock, default_journal
from autoprec.tuning.time_limit import PROOF, Deadline
from autoprec.workers.cpu_contention import said_of_others
from autoprec.workers.prestart import Spares
from autoprec.workers.runner import Runner
from autoprec.workers.task_file import task_digest

#: What was measured this near the best may be faster yet, for machines drift: the second-best
#: recipe of a policy is a finalist too, and a policy is proven though float32 seemed faster.
_NEAR = 0.95

#: A worker starts beside the proof where the budget holds this many times the baseline's memory.
_SPARE_PEAKS = 4

#: Below this share of the fastest proven recipe's speed no proof is spent: the search's own errors
#: are a few per cent.
_HOPELESS = 0.85


@dataclass(frozen=True)
class Result:
    """A finished tuning as it is kept in the study, with the limits it was finished under."""

    profile: Profile
    limits: str


def tune(work: Work) -> Profile:
    """Tune; return the profile. What was learned is kept, however the tuning ends."""
    began = time.monotonic()
    digest = task_digest(work.task)
    folder = Path(tempfile.gettempdir())
    with DeviceLock(
        work.place.facts.identity,
        wait=work.options.wait,
        folder=folder,
        on_wait=lambda text: work.listener(Note(text)),
    ):
        work = with_deadline(work)
        study = _open_study(work, digest)
        kept = study.recall("result", Result)
        finished = kept is not None and kept.limits == repr(work.options.limits())
        with work.runner() as runner:
            if work.place.unusable or not finished:
                work.listener(Stage("start", "loading the task in a worker"))
                work = with_memory(work, load(work, runner).memory)
            if kept is not None and finished:
                work.listener(Finished(kept.profile, study.history(), study.place, from_study=True))
                return kept.profile
            task = preflight(work, study, runner)
            facts, proposal = _look(work, study)
            work.listener(Started(str(work.task), facts, proposal, study.place))
            findings = _learn(work, study, facts, proposal, task, runner)
        profile = build_profile(
            findings,
            task_file=work.task.name,
            digest=digest,
            checkpoint=work.checkpoint,
            forced=not work.float32_allowed,
            seconds=time.monotonic() - began,
        )
        study.remember("result", Result(profile, repr(work.options.limits())))
    work.listener(Finished(profile, findings.history, study.place))
    return profile


def with_deadline(work: Work) -> Work:
    """The work with the moment at which its time limit ends, counted from now."""
    limit = work.options.time_limit
    return work if limit is None else replace(work, deadline=Deadline(time.monotonic(), limit))


def with_memory(work: Work, memory: DeviceMemory | None) -> Work:
    """The work with the accelerator's memory known, and others on the device told of."""
    said = said_of_others(memory) if memory is not None else ""
    if said:
        work.listener(Note(said, warning=True))
    return replace(work, memory=memory)


def _open_study(work: Work, digest: str) -> Study:
    name = study_name(
        work.task.stem,
        digest,
        work.place.facts.fingerprint,
        work.place.software,
        work.options.identity(),
        *(() if work.checkpoint is None else (work.checkpoint,)),
    )
    storage = work.options.storage or default_journal(work.task)
    return Study(storage, name, fresh=work.options.fresh)


def _look(work: Work, study: Study) -> tuple[DeviceFacts, Proposal]:
    facts = study.recall("facts", DeviceFacts)
    if facts is None:
        work.listener(Stage("probe", "timing this device's matrix products"))
        known = work.place.facts
        facts = work.place.measure(known)
        for note in facts.notes[len(known.notes) :]:
            work.listener(Note(note, warning=True))
        study.remember("facts", facts)
    refuse_absent_tf32(work, facts)
    return facts, propose(facts, work.options.policies)


def _learn(
    work: Work,
    study: Study,
    facts: DeviceFacts,
    proposal: Proposal,
    task: TaskFacts,
    runner: Runner,
) -> Findings:
    space = build_space(work, task, facts, proposal)
    study.use(space, sampler=work.options.sampler, seed=work.options.seed)
    work.listener(Described(task, len(study.history()), len(space.points())))
    findings = Findings(
        facts=facts,
        task=task,
        history=(),
        refusals=[*proposal.refusals, *refusals_of(work, task)],
        memory_bytes=work.memory_bytes,
        space=space,
        alignment=min(multiples(work, facts, space.policies), default=1),
    )
    settled = _search(work, study, space, findings, runner)
    prover = Prover(work, study, task, findings, runner)

    def substitute(failed: Recipe) -> Proven | None:
        found = _smaller(failed, space, prover, findings)
        prover.forget()
        return found

    plain = space.recipe(settled)
    with Spares(work.runner, plain) as spares:
        if _worth_a_spare(work, space, plain, findings):
            spares.start()
        proven = _prove(work, space, prover, findings)
        prover.forget()

        def memory_pays(batch_size: int) -> bool:
            return surely_pays(space, settled, findings.history, batch_size)

        Finish(work, runner, plain, findings, spares, memory_pays).run(proven, substitute)
    findings.neighbours = work.watch.worst
    return findings


def _search(work: Work, study: Study, space: Space, findings: Findings, runner: Runner) -> Point:
    """Search and run the heats, until what they mend brings nothing new; return the baseline."""
    baseline = baseline_point(space)
    search = Search(work, study, space, baseline)
    if not findings.rehearsed:
        search.anchor(runner)
    heats = known_heats(study)
    while True:
        findings.history = search.run(runner, heats)
        settled = settled_baseline(space, baseline, findings.history) or baseline
        measured = find(findings.history, settled)
        if measured is None or measured.rate <= 0:
            raise _no_baseline(measured)
        if measured.measurement is not None and not measured.measurement.finite:
            raise _not_finite(work, settled)
        further = run_heats(work, study, space, settled, findings, heats, runner)
        if further == heats:
            break
        heats = further
    if search.late:
        findings.not_covered.append("recipes that the search did not come to")
    findings.ranking = heats.ranking(findings.history)
    if settled != baseline:
        findings.notes.append(
            f"plain float32 does not fit at batch {baseline[BATCH]}: the baseline is batch "
            f"{settled[BATCH]}"
        )
    return settled


def _worth_a_spare(work: Work, space: Space, plain: Recipe, findings: Findings) -> bool:
    """Whether the finish will want a worker of the baseline's own, and it can start by then.

    That is beside a proof, and where there is memory for it.
    """
    budget = work.memory_bytes
    room = budget is None or _SPARE_PEAKS * findings.peak_of(plain) <= budget
    alone = work.on_cpu and not may_share(plain, findings.task.framework)
    fastest = shortlist(findings.ranking, count=1)
    return room and alone and not is_reference(space.recipe(fastest[0].point))


def _no_baseline(outcome: Outcome | None) -> NoFeasibleRecipe:
    why = f"{outcome.status}: {outcome.reason}" if outcome is not None else "no trial ran"
    return NoFeasibleRecipe(
        f"plain float32 does not run at its baseline ({why}); give a smaller BATCH_SIZE or "
        "smaller --batch-sizes"
    )


def _not_finite(work: Work, settled: Point) -> TaskError:
    return TaskError(
        f"{work.task.name}: in float32 the loss became inf or NaN within the first steps at batch "
        f"{settled[BATCH]}, so nothing can be proven against it. Look for inf or NaN in the data "
        "after the first batch, or lower the learning rate"
    )


def _prove(work: Work, space: Space, prover: Prover, findings: Findings) -> list[Proven]:
    """Prove the fastest recipe of every policy that may be chosen and could win, fastest first.

    A proof costs as much as the search, so what is clearly slower than a recipe that passed is not
    proven.
    """
    found: list[Proven] = []
    allowed = work.options.policies or space.policies
    floor = _best_rate(findings, Policy.FLOAT32) if work.float32_allowed else 0.0
    for policy in sorted(space.policies, key=lambda p: -_best_rate(findings, p)):
        if policy not in allowed:
            continue
        own = findings.of(policy.value)
        best = shortlist(own, count=1)
        if not best:
            findings.refusals.append(Refusal(policy.value, _why_nothing(own)))
            continue
        if policy is not Policy.FLOAT32 and best[0].rate < _NEAR * floor:
            seen = (
                "slower than" if findings.rehearsed else f"{best[0].rate / floor:.2g}x the speed of"
            )
            reason = f"measured {seen} the best float32 recipe"
            findings.refusals.append(Refusal(policy.value, reason))
            continue
        if work.deadline.passed(PROOF) and not is_reference(space.recipe(best[0].point)):
            findings.refusals.append(Refusal(policy.value, "no time was left to prove it"))
            findings.not_covered.append(f"the proof of {policy}")
            continue
        leader = max((p.rate for p in found), default=0.0)
        near = [o for o in _leaders(own, findings) if o.rate >= _NEAR * best[0].rate]
        plain = shortlist([o for o in own if keeps_arithmetic(space.recipe(o.point))], count=1)
        passed = _proofs(near, space, prover, leader)
        if not passed:  # what a compiler or a knob broke, the policy by itself may not
            passed = _proofs([o for o in plain if o not in near], space, prover, leader)
        found += passed
    if not found:
        reasons = "; ".join(f"{r.candidate}: {r.reason}" for r in findings.refusals)
        raise NoFeasibleRecipe(
            f"no policy that was asked for passes ({reasons}). Add float32 to --policies, or "
            "accept what trains differently with --accept-drift"
        )
    return found


def _leaders(own: Sequence[Outcome], findings: Findings) -> tuple[Outcome, ...]:
    """The fastest of one policy: one where the heats decided it, two where they could not."""
    return shortlist(own, count=1 if findings.ranking != findings.history else 2)


def _proofs(
    outcomes: Sequence[Outcome], space: Space, prover: Prover, leader: float
) -> list[Proven]:
    """Prove these, but for those that are clearly slower than the fastest proven recipe."""
    worth = [o for o in outcomes if o.rate >= _HOPELESS * leader]
    proofs = [prover.prove(space.recipe(o.point), o, space) for o in worth]
    return [proven for proven in proofs if proven is not None]


def _smaller(failed: Recipe, space: Space, prover: Prover, findings: Findings) -> Proven | None:
    """Prove the fastest recipe of the same policy at a smaller batch than the one that failed."""
    own = findings.of(failed.policy.value)
    best = shortlist([o for o in own if int(o.point[BATCH]) < failed.batch_size], count=1)
    return prover.prove(space.recipe(best[0].point), best[0], space) if best else None


def _best_rate(findings: Findings, policy: Policy) -> float:
    return max((outcome.rate for outcome in findings.of(policy.value)), default=0.0)


def _why_nothing(own: list[Outcome]) -> str:
    failed = [o for o in own if o.status is not Status.OK]
    if not failed:
        return "the search ended before it was tried"
    return f"{failed[0].status}: {failed[0].reason}"
