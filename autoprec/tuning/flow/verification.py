"""Verifies a profile: its recipe and float32 timed in alternation again, and a short proof."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from autoprec.core.numerics.proof_steps import SHORT_STEPS
from autoprec.core.numerics.reference_recipe import is_exact, is_reference
from autoprec.core.numerics.tolerance import Tolerance
from autoprec.core.numerics.verdict import Verdict
from autoprec.core.profile import Gain, Profile, TaskRecord
from autoprec.core.profile.claims import Claim, Verification, judge_numerics, judge_speedup
from autoprec.core.ratio import Ratio
from autoprec.core.recipe import Recipe
from autoprec.core.recipe_words import describe_recipe
from autoprec.core.speed.noise import paired_ratio
from autoprec.core.speed.selection import Finalist
from autoprec.errors import TaskError
from autoprec.tuning.events import Judged, Note, Stage
from autoprec.tuning.flow.preflight import load_task
from autoprec.tuning.flow.tuner import lock, with_memory
from autoprec.tuning.job import TuningJob
from autoprec.tuning.proof.recipe_proof import Proof
from autoprec.tuning.race.interleaved_timing import (
    keep_all,
    time_interleaved,
)
from autoprec.tuning.race.sessions import FinalistFailed
from autoprec.workers.failures import WorkerFailure
from autoprec.workers.runner import RemoteTracer, Runner, raise_unrelated, raise_user_error
from autoprec.workers.task_digest import source_digest, whole_digest
from autoprec.workers.task_source import TaskSource


@dataclass(frozen=True)
class ProfiledMemory:
    """The memory that a profile says its recipes take; float32 at its own batch is not in it."""

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
    with lock(job), job.runner() as runner:
        job.listener(Stage("start", "loading the task in a worker"))
        loaded = load_task(job, runner)
        job = with_memory(job, loaded.memory)
        notes = _changes(job, profile, loaded.fingerprint)
        for note in notes:
            job.listener(Note(note, warning=True))
        known = ProfiledMemory(loaded.framework, profile.baseline, profile)
        try:
            found = _time_again(job, profile, known, runner)
        except FinalistFailed as failed:
            return Verification((_failed_to_run(failed, known.baseline),), notes=notes)
        parity = _prove_again(job, profile, runner)
    claims = [Claim("runs", "holds", describe_recipe(profile.recipe), "it runs")]
    claims += [_judge_gain(*each) for each in zip(profile.gains(), found, strict=False)]
    if parity is not None:
        stated_parity = profile.evidence.parity
        proven = f"{parity.verdict}: {parity.reason}"
        result = judge_numerics(stated_parity, parity)
        claims.append(Claim("numerics", result, stated_parity.verdict, proven))
    return Verification(tuple(claims), next(iter(found), None), parity, notes)


def _judge_gain(stated: Gain, found: Ratio | None) -> Claim:
    """Judge a stated gain by the ratio found now; None: what it is over does not run."""
    name, said = stated.name, stated.ratio.in_words()
    if found is None:
        return Claim(name, "unresolved", said, f"{describe_recipe(stated.rival)} does not run")
    return Claim(name, judge_speedup(stated.ratio, found), said, found.in_words())


def _changes(job: TuningJob, profile: Profile, fingerprint: str) -> tuple[str, ...]:
    """Say what the task has in other form than when it was tuned."""
    found = []
    if profile.task.sha256 not in (
        source_digest(job.task, fingerprint),
        whole_digest(job.task.path),
    ):
        found.append(_how_it_changed(job.task, profile.task))
    started = profile.evidence.checkpoint
    if started is not None and job.checkpoint != started:
        found.append(
            f"this profile was checked from the weights in {started.file}; give the same file as "
            "`checkpoint` to check it from there again"
        )
    return tuple(found)


def _how_it_changed(task: TaskSource, tuned: TaskRecord) -> str:
    """Say in which way a task is another one than the one that was tuned."""
    here = _run_in_words(task.arguments, task.at)
    then = _run_in_words(tuned.arguments, tuned.at or 1)
    if not task.plain and here != then:
        return f"{task.name} runs {here}, and this profile was tuned {then}"
    how = "" if task.plain else ", or a file that it reads,"
    return f"{task.name}{how} has changed since this profile was made"


def _run_in_words(arguments: Sequence[str], at: int) -> str:
    said = f"with the arguments {shlex.join(arguments)}" if arguments else "without arguments"
    return said if at == 1 else f"{said} up to its training number {at}"


def _time_again(
    job: TuningJob, profile: Profile, known: ProfiledMemory, runner: Runner
) -> tuple[Ratio | None, ...]:
    """Return a ratio found now for each of a profile's gains; none where there are none.

    None stands for what the recipe is compared with, if that does not run.
    """
    gains, recipe = profile.gains(), profile.recipe
    if recipe.key() == known.baseline.key() or not gains:
        return ()
    job.listener(Stage("confirmation", "the profile's recipe against float32"))
    try:
        return _time_gains(job, gains, recipe, known, runner)
    except FinalistFailed as failed:
        if failed.recipe.key() in (recipe.key(), known.baseline.key()):
            raise
        raise_unrelated(failed.failure)
        left = [gain for gain in gains if gain.rival.key() != failed.recipe.key()]
        ratios = iter(_time_gains(job, left, recipe, known, runner))
        return tuple(next(ratios) if gain in left else None for gain in gains)


def _time_gains(
    job: TuningJob,
    gains: Sequence[Gain],
    recipe: Recipe,
    known: ProfiledMemory,
    runner: Runner,
) -> tuple[Ratio, ...]:
    """Time the recipe against what it is said to be faster than, longer if that is left open."""
    rounds = job.options.rounds

    def ratios(finalists: tuple[Finalist, ...]) -> tuple[Ratio, ...]:
        *rivals, own = finalists
        return tuple(paired_ratio(own.rates, rival.rates) for rival in rivals)

    def running(finalists: tuple[Finalist, ...]) -> Collection[int]:
        found = zip(gains, ratios(finalists), strict=True)
        decided = all(judge_speedup(gain.ratio, each) != "unresolved" for gain, each in found)
        return () if decided and len(finalists[0].rates) >= rounds else keep_all(finalists)

    timed = [*(gain.rival for gain in gains), recipe]
    return ratios(time_interleaved(job, timed, 2 * rounds, known, runner, running).finalists)


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
        trained_batch=stated.trained_batch,
        start="" if job.checkpoint is None else job.checkpoint.file,
    )
    try:
        verdict = proof.prove(recipe)
    except WorkerFailure as failure:
        raise_unrelated(failure)
        verdict = Verdict("unproven", f"the check ended with {failure.kind}: {failure.message}")
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
