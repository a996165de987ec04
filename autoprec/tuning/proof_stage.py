"""Proves recipes for the tuner: tune the loss scale, judge, look for islands, keep the verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import replace
from typing import Any

from autoprec.core.codec import to_plain
from autoprec.core.device.policies import Refusal
from autoprec.core.dtypes import Policy
from autoprec.core.measurement import TaskFacts, TimingBudget
from autoprec.core.numerics.parity import Tolerance, Verdict
from autoprec.core.recipe import Recipe
from autoprec.core.speed.space import Space
from autoprec.core.speed.trial_results import Outcome
from autoprec.tuning.events import Explained, Judged, Note, Progress, Stage
from autoprec.tuning.island_search import IslandSearchResult
from autoprec.tuning.job import TuningJob
from autoprec.tuning.options import Options
from autoprec.tuning.profile_builder import REFERENCE, Findings, ProvenRecipe
from autoprec.tuning.proof import Proof
from autoprec.tuning.study import Study
from autoprec.tuning.time_limit import PROOF_SHARE
from autoprec.workers.failures import WorkerFailure
from autoprec.workers.runner import (
    RETRIED_FAILURES,
    RemoteTracer,
    Runner,
    raise_device_lost,
    run_trial,
)


def keeps_arithmetic(recipe: Recipe) -> bool:
    """Whether a recipe changes nothing of the arithmetic besides its policy."""
    return not (recipe.compile or recipe.alignment.modules or rounds_float32(recipe))


def rounds_float32(recipe: Recipe) -> bool:
    """Whether float32 products are rounded throughout the process, and so in islands too."""
    return recipe.knobs.get("implicit_bfloat16") is True


def is_reference(recipe: Recipe) -> bool:
    """Whether a recipe computes exactly what plain float32 computes, only elsewhere or faster."""
    return recipe.policy is Policy.FLOAT32 and keeps_arithmetic(recipe)


class StoredProofSteps(MutableMapping[str, int]):
    """How many steps the proofs of a study take, by batch: a resumed tuning takes as many."""

    def __init__(self, study: Study, options: Options) -> None:
        self._study = study
        self._name = f"proof steps:{options.proof_seconds!r}:{options.time_limit!r}"

    def _all(self) -> dict[str, int]:
        return dict(self._study.notes().get(self._name, {}))

    def __getitem__(self, batch: str) -> int:
        return self._all()[batch]

    def __setitem__(self, batch: str, steps: int) -> None:
        self._study.remember(self._name, self._all() | {batch: steps})

    def __delitem__(self, batch: str) -> None:
        self._study.remember(self._name, {b: n for b, n in self._all().items() if b != batch})

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())


class Prover:
    """Proves recipes of one task in the tuner's worker."""

    def __init__(
        self, job: TuningJob, study: Study, task: TaskFacts, findings: Findings, runner: Runner
    ) -> None:
        self._options, self._listener = job.options, job.listener
        self._deadline = job.deadline
        self._study, self._task, self._findings = study, task, findings
        self._runner = runner
        self._proof = Proof(
            RemoteTracer(runner),
            tolerance=Tolerance().scaled(job.options.tolerance),
            steps=job.options.proof_steps,
            seconds=job.options.proof_seconds,
            chosen=StoredProofSteps(study, job.options),
            start="" if job.checkpoint is None else job.checkpoint.file,
            until=job.deadline.end_of(PROOF_SHARE),
            on_event=self._progress,
        )

    def prove(self, recipe: Recipe, outcome: Outcome, space: Space) -> ProvenRecipe | None:
        """Prove `recipe`; None where neither it nor it with islands trains like float32."""
        seconds = outcome.measurement.step_seconds if outcome.measurement else 1.0
        if is_reference(recipe):
            return ProvenRecipe(recipe, REFERENCE, outcome.rate, seconds)
        self._listener(Stage("proof", f"{recipe.policy} at batch {recipe.batch_size}"))
        known = self._recall(recipe)
        if known is not None:
            accepted = known.verdict.accepted or self._drifts(known.verdict)
            return _at_rate(known, outcome.rate, seconds) if accepted else None
        try:
            proven = self._prove_again_after_a_fault(recipe, outcome.rate, seconds, space)
        except WorkerFailure as failure:
            raise_device_lost(failure)
            self._proof.forget()
            self._refuse(recipe, f"the proof ended with {failure.kind}: {failure.message[:200]}")
            return None
        self._keep(recipe, proven)
        self._explain(recipe if proven is None else proven.recipe)
        return proven

    def forget(self) -> None:
        """Give back the memory that proofs hold in the worker."""
        self._proof.forget()
        if self._runner.pids:
            self._runner.call("discard_traces")

    def _explain(self, recipe: Recipe) -> None:
        """Tell how large each module's numbers are, if that was asked for."""
        if not self._options.explain or not recipe.policy.mixed:
            return
        try:
            units = self._runner.call("unit_magnitudes", recipe=recipe)
        except WorkerFailure as failure:
            self._listener(Note(f"the magnitudes could not be measured: {failure.message[:200]}"))
        else:
            self._listener(Explained(recipe, units))

    def _prove_again_after_a_fault(
        self, recipe: Recipe, rate: float, seconds: float, space: Space
    ) -> ProvenRecipe | None:
        """Prove, and once more after a failure that may be the machine's (`RETRIED_FAILURES`)."""
        try:
            return self._prove(recipe, rate, seconds, space)
        except WorkerFailure as failure:
            if failure.kind not in RETRIED_FAILURES:
                raise
        self._proof.forget()
        return self._prove(recipe, rate, seconds, space)

    def _prove(
        self, recipe: Recipe, rate: float, seconds: float, space: Space
    ) -> ProvenRecipe | None:
        scale_evidence: Mapping[str, Any] | None = None
        if recipe.policy.needs_loss_scale:
            scale, evidence = self._proof.tune_loss_scale(recipe)
            recipe = replace(recipe, loss_scale=scale)
            scale_evidence = to_plain(evidence)
        verdict = self._judge(recipe)
        if verdict.accepted or self._drifts(verdict):
            return ProvenRecipe(recipe, verdict, rate, seconds, scale_evidence)
        no_islands = not recipe.policy.mixed or rounds_float32(recipe)
        if no_islands or self._deadline.passed(PROOF_SHARE):
            self._refuse(recipe, verdict.reason)
            return None
        return self._with_islands(recipe, verdict, space, rate, scale_evidence)

    def _judge(self, recipe: Recipe) -> Verdict:
        verdict = self._proof.prove(recipe)
        self._findings.proof_seconds += verdict.seconds
        left = f" (not covered: {'; '.join(verdict.not_covered)})" if verdict.not_covered else ""
        self._listener(Judged(recipe, verdict.verdict, verdict.reason + left))
        return verdict

    def _drifts(self, verdict: Verdict) -> bool:
        return verdict.verdict == "drift" and self._options.accept_drift

    def _with_islands(
        self,
        recipe: Recipe,
        verdict: Verdict,
        space: Space,
        rate: float,
        scale_evidence: Mapping[str, Any] | None,
    ) -> ProvenRecipe | None:
        self._listener(Stage("islands", f"which modules must stay in float32: {verdict.reason}"))
        found = self._proof.find_islands(recipe, self._task.units)
        if found.recipe is None or found.verdict is None:
            units = ", ".join(path or "the root" for path in found.tried[:12]) or "none"
            self._refuse(recipe, f"{verdict.reason}; {found.reason}. Kept in float32: {units}")
            return None
        worker = self._runner.pids
        mended = run_trial(
            self._runner,
            space.point(found.recipe),
            found.recipe,
            seed=self._options.seed,
            budget=TimingBudget(),
        )
        if self._runner.pids != worker:
            self._proof.forget()
        if mended.measurement is None or mended.rate <= 0:
            self._refuse(recipe, f"with islands it does not run: {mended.reason}")
            return None
        self._listener(Judged(found.recipe, found.verdict.verdict, found.reason))
        return ProvenRecipe(
            found.recipe,
            found.verdict,
            mended.rate,
            mended.measurement.step_seconds,
            scale_evidence,
            _islands_evidence(found, mended.rate / rate),
        )

    def _refuse(self, recipe: Recipe, reason: str) -> None:
        self._findings.refusals.append(Refusal(recipe.policy.value, reason))
        self._listener(Judged(recipe, "rejected", reason))

    def _progress(self, phase: str, step: int) -> None:
        self._listener(Progress(phase, step))

    # What a stopped tuning need not prove again -------------------------------------------------

    def _name(self, recipe: Recipe) -> str:
        return f"proof:{self._options.limits()!r}:{recipe.key()}"

    def _recall(self, recipe: Recipe) -> ProvenRecipe | None:
        return self._study.recall(self._name(recipe), ProvenRecipe)

    def _keep(self, recipe: Recipe, proven: ProvenRecipe | None) -> None:
        if proven is not None:
            self._study.remember(self._name(recipe), proven)


def _at_rate(known: ProvenRecipe, rate: float, seconds: float) -> ProvenRecipe:
    """What was proven earlier, at the speed that its recipe has now; islands slow it as before."""
    kept = float((known.islands or {}).get("speed_kept", 1.0)) or 1.0
    return replace(known, rate=rate * kept, step_seconds=seconds / kept)


def _islands_evidence(found: IslandSearchResult, speed: float) -> Mapping[str, Any]:
    """What the profile says of the islands; `speed_kept` is relative to the plain policy."""
    return {
        "trials": found.trials,
        "share_of_products_in_float32": round(found.products, 4),
        "speed_kept": round(speed, 4),
        "reason": found.reason,
    }
