"""Verifies a profile: its recipe and float32 timed in alternation again, and a short proof."""

from __future__ import annotations

import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from autoprec.core.numerics.proof_steps import SHORT_STEPS
from autoprec.core.numerics.reference_recipe import is_exact, is_reference
from autoprec.core.numerics.tolerance import Tolerance
from autoprec.core.numerics.verdict import Verdict
from autoprec.core.profile import Profile
from autoprec.core.profile_claims import Claim, Verification, judge_numerics, judge_speedup
from autoprec.core.recipe import Recipe
from autoprec.core.recipe_words import describe_recipe
from autoprec.core.speed.noise import Ratio, paired_ratio
from autoprec.core.speed.selection import Finalist
from autoprec.errors import TaskError
from autoprec.tuning.confirmation.interleaved_timing import (
    FinalistFailed,
    keep_all,
    time_interleaved,
)
from autoprec.tuning.events import Judged, Note, Stage
from autoprec.tuning.job import TuningJob
from autoprec.tuning.preflight import load_task
from autoprec.tuning.proof.recipe_proof import Proof
from autoprec.tuning.study.device_lock import lock_devices
from autoprec.tuning.tuner import with_memory
from autoprec.workers.failures import WorkerFailure
from autoprec.workers.runner import RemoteTracer, Runner, raise_unrelated, raise_user_error
from autoprec.workers.task_digest import task_digest, whole_digest


@dataclass(frozen=True)
class ProfiledMemory:
    """The memory that a profile says its two recipes take."""

    framework: str
    baseline: Recipe
    profile: Profile

    def peak_memory_of(self, recipe: Recipe) -> int:
        """Return a recipe's peak memory in bytes."""
        evidence = self.profile.evidence
        plain = recipe.key() == self.baseline.key()
        return (evidence.baseline if plain else evidence.chosen).peak_memory_bytes


def verify(job: TuningJob, profile: Profile) -> Verification:
    """Measure and prove a profile's recipe again; say which of its claims hold.

    Raises `TaskError` where plain float32 does not run any more.
    """
    notes = _changes(job, profile)
    for note in notes:
        job.listener(Note(note, warning=True))
    with (
        lock_devices(
            [each.identity for each in job.devices],
            wait=job.options.wait,
            folder=Path(tempfile.gettempdir()),
            on_wait=lambda text: job.listener(Note(text)),
        ),
        job.runner() as runner,
    ):
        job.listener(Stage("start", "loading the task in a worker"))
        loaded = load_task(job, runner)
        job = with_memory(job, loaded.memory)
        known = ProfiledMemory(loaded.framework, profile.baseline, profile)
        try:
            speedup = _time_again(job, profile, known, runner)
        except FinalistFailed as failed:
            return Verification((_failed_to_run(failed, known.baseline),), notes=notes)
        parity = _prove_again(job, profile, runner)
    claims = [Claim("runs", "holds", describe_recipe(profile.recipe), "it runs")]
    if speedup is not None:
        stated = profile.evidence.speedup
        claims.append(
            Claim("speed-up", judge_speedup(stated, speedup), stated.in_words(), speedup.in_words())
        )
    if parity is not None:
        stated_parity = profile.evidence.parity
        found = f"{parity.verdict}: {parity.reason}"
        result = judge_numerics(stated_parity, parity)
        claims.append(Claim("numerics", result, stated_parity.verdict, found))
    return Verification(tuple(claims), speedup, parity, notes)


def _changes(job: TuningJob, profile: Profile) -> tuple[str, ...]:
    """Say what the task has in other form than when it was tuned."""
    found = []
    if profile.task.sha256 not in (task_digest(job.task), whole_digest(job.task)):
        found.append(f"{job.task.name} has changed since this profile was made")
    started = profile.evidence.checkpoint
    if started is not None and job.checkpoint != started:
        found.append(
            f"this profile was proven from the weights in {started.file}; give the same file as "
            "`checkpoint` to prove it from there again"
        )
    return tuple(found)


def _time_again(
    job: TuningJob, profile: Profile, known: ProfiledMemory, runner: Runner
) -> Ratio | None:
    """Time the recipe against the baseline, longer where that leaves it open; None: the same."""
    stated, recipe, rounds = profile.evidence.speedup, profile.recipe, job.options.rounds
    if recipe.key() == known.baseline.key() or not stated.rounds:
        return None
    job.listener(Stage("confirmation", "the profile's recipe against float32"))

    def running(finalists: tuple[Finalist, ...]) -> Collection[int]:
        ratio = paired_ratio(finalists[1].rates, finalists[0].rates)
        decided = judge_speedup(stated, ratio) != "unresolved"
        return () if decided and ratio.rounds >= rounds else keep_all(finalists)

    timed = time_interleaved(job, [known.baseline, recipe], 2 * rounds, known, runner, running)
    return paired_ratio(timed.finalists[1].rates, timed.finalists[0].rates)


def _prove_again(job: TuningJob, profile: Profile, runner: Runner) -> Verdict | None:
    """Prove the recipe over its first steps; None for plain float32, which is the reference."""
    recipe, stated = profile.recipe, profile.evidence.parity
    if is_reference(recipe):
        return None
    exact = is_exact(recipe)
    said = "its settings in float32" if exact else f"the first {_steps(stated)} steps"
    job.listener(Stage("proof", said))
    proof = Proof(
        RemoteTracer(runner),
        tolerance=Tolerance().scaled(job.options.tolerance),
        steps=_steps(stated),
        start="" if job.checkpoint is None else job.checkpoint.file,
    )
    try:
        verdict = proof.prove(recipe)
    except WorkerFailure as failure:
        raise_unrelated(failure)
        verdict = Verdict("unproven", f"the proof ended with {failure.kind}: {failure.message}")
    job.listener(Judged(recipe, verdict.verdict, verdict.reason))
    return verdict


def _steps(stated: Verdict) -> int:
    return min(stated.most_steps or SHORT_STEPS, SHORT_STEPS)


def _failed_to_run(failed: FinalistFailed, baseline: Recipe) -> Claim:
    """Return the claim that fails; raise where the baseline, the device or the task does."""
    raise_unrelated(failed.failure)
    if failed.recipe.key() == baseline.key():
        raise_user_error(failed.failure)
        raise TaskError(f"plain float32 does not run: {failed}") from failed
    return Claim("runs", "fails", describe_recipe(failed.recipe), str(failed))
