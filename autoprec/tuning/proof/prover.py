"""Proves each recipe once, in a worker: retries after faults, and stores the verdicts."""

from __future__ import annotations

import time
from collections import UserDict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from autoprec.core.device.policies import Refusal
from autoprec.core.numerics.island_proposals import IslandsEvidence
from autoprec.core.numerics.loss_scale_choice import ScaleEvidence
from autoprec.core.numerics.noise_scale import NoiseScale
from autoprec.core.numerics.proof_steps import ProofLength
from autoprec.core.numerics.reference_recipe import is_reference, rounds_everywhere
from autoprec.core.numerics.tolerance import Tolerance
from autoprec.core.numerics.verdict import Verdict
from autoprec.core.recipe import Recipe, communication_settings
from autoprec.core.recipe_words import describe_settings, name_recipe
from autoprec.core.speed.timing_budget import TimingBudget
from autoprec.core.speed.trial_results import Outcome
from autoprec.tuning.events import Explained, Judged, Note, Progress, Stage
from autoprec.tuning.job import TuningJob
from autoprec.tuning.options import Options
from autoprec.tuning.proof.recipe_proof import Proof
from autoprec.tuning.stage_results import (
    REFERENCE,
    NeededIslands,
    PreflightResult,
    ProvenRecipe,
    SearchResult,
)
from autoprec.tuning.study.notes import NOISE_SCALE, PROOF, PROOF_LENGTHS, StudyNote
from autoprec.tuning.study.study import Study
from autoprec.tuning.time_limit import PROOF_SHARE
from autoprec.workers.failures import WorkerFailure
from autoprec.workers.runner import (
    RETRIED_FAILURES,
    RemoteTracer,
    Runner,
    raise_unrelated,
    run_trial,
)

#: Settings that change a tuning's result, and no verdict.
_NOT_OF_PROOFS = ("attribute", "baseline", "search_limit", "trials")


class StoredProofLengths(UserDict[str, ProofLength]):
    """How long a study's proofs are, by batch, so that a resumed tuning's are as long."""

    def __init__(self, study: Study, options: Options) -> None:
        super().__init__()
        self._study = study
        self._note = PROOF_LENGTHS.of(options.proof_seconds, options.time_limit)
        self.data = study.recall(self._note) or {}

    def __setitem__(self, batch: str, length: ProofLength) -> None:
        super().__setitem__(batch, length)
        self._study.remember(self._note, self.data)


@dataclass(frozen=True)
class ProofAttempt:
    """A recipe's proof: the proven recipe, or why it was refused; `seconds` is all that it took.

    Neither is set for a recipe that an earlier run of the tuning refused. `guilty` are the
    settings of it that change what float32 computes, `left_out` what the time limit left out.
    """

    proven: ProvenRecipe | None = None
    refusal: Refusal | None = None
    seconds: float = 0.0
    guilty: tuple[str, ...] = ()
    left_out: str = ""


class Prover:
    """Proves recipes of one task in the tuner's worker: loss scale, judgement, float32 islands.

    A recipe is proven once in a tuning. Verdicts that accept one are kept in the study, so that a
    resumed tuning need not prove it again either.
    """

    def __init__(
        self, job: TuningJob, study: Study, preflight: PreflightResult, runner: Runner
    ) -> None:
        self._options, self._listener = job.options, job.listener
        self._deadline = job.deadline
        self._study, self._runner = study, runner
        self._space, self._units = preflight.space, preflight.task.units
        self._needed_islands: Mapping[str, NeededIslands] = {}
        self._attempts: dict[str, ProofAttempt] = {}
        self._proof = Proof(
            RemoteTracer(runner),
            tolerance=Tolerance().scaled(job.options.tolerance),
            steps=job.options.proof_steps,
            seconds=job.options.proof_seconds,
            chosen=StoredProofLengths(study, job.options),
            start="" if job.checkpoint is None else job.checkpoint.file,
            until=job.deadline.end_of(PROOF_SHARE),
            on_event=self._report_progress,
        )

    def take(self, search: SearchResult) -> None:
        """Prove recipes of this search from now on: its space has what policies need in float32."""
        self._space, self._needed_islands = search.trials.space, search.needed_islands

    def prove(self, outcome: Outcome) -> ProofAttempt:
        """Prove the recipe of a trial, with islands where it does not train like float32 alone."""
        recipe = self._space.recipe(outcome.point)
        seconds = outcome.measurement.step_seconds if outcome.measurement else 1.0
        if is_reference(recipe):
            return ProofAttempt(ProvenRecipe(recipe, REFERENCE, outcome.rate, seconds))
        before = self._attempts.get(recipe.key())
        if before is not None:  # the search ran again since
            proven = before.proven and _at_rate(before.proven, outcome.rate, seconds)
            return ProofAttempt(proven, before.refusal, guilty=before.guilty)
        attempt = self._attempts[recipe.key()] = self._attempt(recipe, outcome.rate, seconds)
        return attempt

    def _attempt(self, recipe: Recipe, rate: float, seconds: float) -> ProofAttempt:
        self._listener(Stage("proof", name_recipe(recipe)))
        known = self._recall(recipe)
        if known is not None:
            accepted = known.verdict.accepted or self._drifts(known.verdict)
            return ProofAttempt(_at_rate(known, rate, seconds) if accepted else None)
        started = time.monotonic()
        try:
            attempt = self._prove_retrying(recipe, rate, seconds)
        except WorkerFailure as failure:
            raise_unrelated(failure)
            self._proof.forget()
            reason = f"the check ended with {failure.kind}: {failure.message[:200]}"
            attempt = self._refuse(recipe, reason)
            return replace(attempt, seconds=time.monotonic() - started)
        attempt = replace(attempt, seconds=time.monotonic() - started)
        if attempt.proven is not None:
            seen = self._proof.noise_scale(recipe)
            attempt = replace(attempt, proven=replace(attempt.proven, noise_scale=seen))
        self._keep(recipe, attempt.proven)
        self._explain(recipe if attempt.proven is None else attempt.proven.recipe)
        return attempt

    def noise_scale(self, recipe: Recipe) -> NoiseScale | None:
        """Measure the gradient noise scale at the first steps of float32 at the recipe's batch.

        None where gradients cannot be compared, or no time is left.
        """
        note = NOISE_SCALE.of(recipe.key())
        found = self._study.recall(note)
        if found is None:
            self._listener(Stage("proof", "how noisy the gradient is, in float32"))
            try:
                found = self._proof.measure_noise_scale(recipe)
            except WorkerFailure as failure:
                raise_unrelated(failure)
            self.forget()
            if found is not None:
                self._study.remember(note, found)
        return found

    def forget(self) -> None:
        """Release the memory that proofs hold in the worker."""
        self._proof.forget()
        if self._runner.pids:
            self._runner.call("discard_traces")

    def _explain(self, recipe: Recipe) -> None:
        """Report how large each module's numbers are, if `explain` is set."""
        if not self._options.explain or not recipe.policy.mixed:
            return
        try:
            units = self._runner.call("unit_magnitudes", recipe=recipe)
        except WorkerFailure as failure:
            self._listener(Note(f"the magnitudes could not be measured: {failure.message[:200]}"))
        else:
            self._listener(Explained(recipe, units))

    def _prove_retrying(self, recipe: Recipe, rate: float, seconds: float) -> ProofAttempt:
        """Prove; once more where the worker was killed or the device faulted."""
        try:
            return self._prove(recipe, rate, seconds)
        except WorkerFailure as failure:
            if failure.kind not in RETRIED_FAILURES:
                raise
        self._proof.forget()
        return self._prove(recipe, rate, seconds)

    def _prove(self, recipe: Recipe, rate: float, seconds: float) -> ProofAttempt:
        settings = self._proof.compare_settings(recipe)
        if settings is not None and settings.verdict.verdict == "rejected":
            return replace(self._refuse(recipe, settings.verdict.reason), guilty=settings.guilty)
        attempt = self._prove_policy(recipe, rate, seconds)
        if attempt.proven is None or settings is None:
            return attempt
        return replace(attempt, proven=replace(attempt.proven, settings=settings.verdict))

    def _prove_policy(self, recipe: Recipe, rate: float, seconds: float) -> ProofAttempt:
        """Prove a recipe whose settings are right."""
        evidence: ScaleEvidence | None = None
        if recipe.policy.needs_loss_scale:
            scale, evidence = self._proof.tune_loss_scale(recipe)
            recipe = replace(recipe, loss_scale=scale)
        verdict = self._judge(recipe)
        if verdict.accepted or self._drifts(verdict):
            needed = self._needed_evidence(recipe)
            return ProofAttempt(ProvenRecipe(recipe, verdict, rate, seconds, evidence, needed))
        no_islands = not recipe.policy.mixed or rounds_everywhere(recipe)
        if no_islands or self._deadline.passed(PROOF_SHARE):
            refused = self._refuse(recipe, verdict.reason, told=True)
            return replace(refused, left_out=self._left_out(recipe, verdict))
        return self._prove_with_islands(recipe, verdict, rate, evidence)

    def _needed_evidence(self, recipe: Recipe) -> IslandsEvidence | None:
        """Return the profile's evidence on what the policy cannot run without in float32."""
        needed = self._needed_islands.get(recipe.policy.value)
        if needed is None:
            return None
        return IslandsEvidence.of(needed.attempts, needed.products, needed.reason)

    def _judge(self, recipe: Recipe) -> Verdict:
        verdict = self._proof.prove(recipe)
        left = f" (not covered: {'; '.join(verdict.not_covered)})" if verdict.not_covered else ""
        self._listener(Judged(recipe, verdict.verdict, verdict.reason + left))
        return verdict

    def _drifts(self, verdict: Verdict) -> bool:
        return verdict.verdict == "drift" and self._options.accept_drift

    def _prove_with_islands(
        self,
        recipe: Recipe,
        verdict: Verdict,
        rate: float,
        scale_evidence: ScaleEvidence | None,
    ) -> ProofAttempt:
        self._listener(Stage("islands", f"which modules must stay in float32: {verdict.reason}"))
        found = self._proof.find_islands(recipe, self._units)
        if found.recipe is None or found.verdict is None:
            units = ", ".join(path or "the root" for path in found.tried[:12]) or "none"
            reason = f"{verdict.reason}; {found.reason}. Kept in float32: {units}"
            return replace(self._refuse(recipe, reason), left_out=self._left_out(recipe, verdict))
        worker = self._runner.pids
        timed = run_trial(
            self._runner,
            self._space.point(found.recipe),
            found.recipe,
            seed=self._options.seed,
            budget=TimingBudget(),
        )
        if self._runner.pids != worker:
            self._proof.forget()
        if timed.measurement is None or timed.rate <= 0:
            why = f"with those modules in float32 it does not run: {timed.reason}"
            return self._refuse(recipe, why)
        self._listener(Judged(found.recipe, found.verdict.verdict, found.reason))
        return ProofAttempt(
            ProvenRecipe(
                found.recipe,
                found.verdict,
                timed.rate,
                timed.measurement.step_seconds,
                scale_evidence,
                IslandsEvidence.of(found.trials, found.products, found.reason, timed.rate / rate),
            )
        )

    def _refuse(self, recipe: Recipe, reason: str, *, told: bool = False) -> ProofAttempt:
        """Refuse a recipe; say so, unless its verdict was `told`."""
        travels = communication_settings(recipe)
        if travels:
            reason = f"with {describe_settings(travels)}: {reason}"
        if not told:
            self._listener(Judged(recipe, "rejected", reason))
        return ProofAttempt(refusal=Refusal(recipe.policy.value, reason))

    def _left_out(self, recipe: Recipe, verdict: Verdict) -> str:
        """Say what the time limit left out of a check that did not accept the recipe."""
        if not self._deadline.passed(PROOF_SHARE):
            return ""
        if verdict.verdict in ("equal at single steps", "unproven"):
            return f"the rest of the check of {name_recipe(recipe)}"
        if not recipe.policy.mixed or rounds_everywhere(recipe):
            return ""
        return f"which modules {recipe.policy} needs in float32"

    def _report_progress(self, phase: str, step: int) -> None:
        self._listener(Progress(phase, step))

    def _note(self, recipe: Recipe) -> StudyNote[ProvenRecipe]:
        limits = self._options.limits().items()
        kept = {name: value for name, value in limits if name not in _NOT_OF_PROOFS}
        return PROOF.of(kept, recipe.key())

    def _recall(self, recipe: Recipe) -> ProvenRecipe | None:
        return self._study.recall(self._note(recipe))

    def _keep(self, recipe: Recipe, proven: ProvenRecipe | None) -> None:
        if proven is not None:
            self._study.remember(self._note(recipe), proven)


def _at_rate(known: ProvenRecipe, rate: float, seconds: float) -> ProvenRecipe:
    """Return a recipe proven earlier, at its present speed; islands slow it down as before."""
    kept = (known.islands.speed_kept if known.islands is not None else 1.0) or 1.0
    return replace(known, rate=rate * kept, step_seconds=seconds / kept)
