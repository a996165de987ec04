"""Proves that a recipe trains like float32: makes the runs that core's judge needs.

How far a proof goes is counted in steps, never in time, and chosen once for each batch, by the pace
of float32's first steps (`core.numerics.proof_steps`): once the first steps have passed, float32 is
trained for as long as its loss falls, and the candidate as far. Where the first 30 steps are all,
one recipe costs 69: the reference and the candidate's run of 30 (two of each where training is not
close, or with a metric), and at four checkpoints a step of the candidate and one of float32 on
another batch, which tells how noisy gradients are; at the last one both evaluate, a forward pass
each. None of those takes an optimizer step. Three perturbed ones of float32 there, and a perturbed
training, follow only where a test fails without them. The tracer lives in a worker; only plain
values come back.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import replace
from functools import partial

from autoprec.backends.protocol import Tracer
from autoprec.backends.shared.raising_modules import modules_raised_in
from autoprec.core.dtypes import DType
from autoprec.core.measurement import Unit
from autoprec.core.numerics import judging, proof_steps
from autoprec.core.numerics.exact_settings import SettingsVerdict
from autoprec.core.numerics.loss_curves import sample_curves
from autoprec.core.numerics.loss_scale_choice import ScaleEvidence
from autoprec.core.numerics.noise_scale import NoiseScale
from autoprec.core.numerics.proof_steps import ProofLength
from autoprec.core.numerics.reference_recipe import is_exact
from autoprec.core.numerics.runnable import RunAttempt
from autoprec.core.numerics.tolerance import Tolerance
from autoprec.core.numerics.verdict import ProofEvidence, Verdict
from autoprec.core.recipe import LossScale, Recipe
from autoprec.errors import TaskError, first_line
from autoprec.tuning.proof import loss_scale_search
from autoprec.tuning.proof.evidence_stages import EvidenceStages
from autoprec.tuning.proof.island_search import (
    IslandSearchResult,
    name_modules,
    product_share,
    search_islands,
    search_runnable,
)
from autoprec.tuning.proof.recorded_runs import (
    SEEDS,
    ProofTimeout,
    RunRecorder,
)
from autoprec.tuning.proof.settings_proof import SettingsProof, raised_by_recipe
from autoprec.workers.failures import WorkerFailure

OnProgress = Callable[[str, int], None]

PACE_SECONDS = 2.0
"""After so many seconds float32 has shown what a step costs: slow steps vary less."""

PACE_STEPS = 9
"""Steps that show it at a smaller batch; the first one, which builds, does not count."""

STALL_FACTOR = 20.0
"""A proof that takes this many times its time budget has stalled; the rest is not covered."""


def silent(phase: str, step: int) -> None:
    """Report nothing."""


class Proof:
    """Proves recipes of one task with one tracer.

    `steps` is the maximum number of steps of a proof, and `trained_batch` the batch that it trains
    at where that is smaller than a recipe's own. Without `steps` both are chosen: a batch whose
    float32 step is not slow, and as many steps as cost at most `seconds`, and as end before the
    clock reading `until`. `chosen` keeps that by batch: a repeated proof takes as many. `start`
    names the weights that training begins with, where they are not fresh.
    """

    def __init__(
        self,
        tracer: Tracer,
        *,
        tolerance: Tolerance | None = None,
        steps: int | None = None,
        trained_batch: int = 0,
        seconds: float | None = None,
        chosen: MutableMapping[str, ProofLength] | None = None,
        start: str = "",
        until: float = math.inf,
        on_event: OnProgress = silent,
    ) -> None:
        self._tracer, self._on_event = tracer, on_event
        self._recorder = RunRecorder(tracer)
        self._settings = SettingsProof(tracer)
        self._tolerance = tolerance or Tolerance()
        self._stages = EvidenceStages(self._recorder, self._tolerance)
        self._steps, self._trained_batch = steps, trained_batch
        self._until, self._start = until, start
        self._budget_seconds = proof_steps.DEFAULT_SECONDS if seconds is None else seconds
        self._chosen: MutableMapping[str, ProofLength] = {} if chosen is None else chosen

    def forget(self) -> None:
        """Record float32 again: the tracer's worker was replaced."""
        self._recorder.forget()

    def noise_scale(self, recipe: Recipe) -> NoiseScale | None:
        """Return the gradient noise scale that the proof saw at the recipe's batch, if it did."""
        return self._recorder.noise_scale(recipe)

    def measure_noise_scale(self, recipe: Recipe) -> NoiseScale | None:
        """Train float32 at the recipe's batch for the first steps; return what they showed."""
        length = ProofLength(proof_steps.SHORT_STEPS, recipe.batch_size)
        self._recorder.deadline = self._until
        try:
            runs = self._recorder.reference(recipe, length)
            self._recorder.compare(recipe.in_float32(), runs)
        except ProofTimeout:
            self.forget()
        finally:
            self._recorder.deadline = math.inf
        return self.noise_scale(recipe)

    def prove(
        self, recipe: Recipe, *, seeds: Sequence[int] = SEEDS, until_failure: bool = False
    ) -> Verdict:
        """Judge `recipe`: its settings in float32, then its training against float32's.

        What is float32 with settings needs no training: a comparison with plain float32 at the same
        weights and the unsplit batch proves it. Everything else trains at its own micro-batch.
        Where the comparison at the same weights is undecided and only a longer run decides it, one
        seed runs longer instead of two; and one is enough where it stays close to float32.
        `until_failure` leaves the trainings out where that comparison has failed already. Code that
        raises under the recipe, but not in float32, is a rejection.
        """
        started = time.monotonic()
        settings = self.compare_settings(recipe)
        if settings is not None and (
            settings.verdict.verdict == "rejected" or (settings.accepted and is_exact(recipe))
        ):
            return replace(settings.verdict, seconds=time.monotonic() - started)
        length = self._length(recipe)
        evidence = ProofEvidence(
            roundoff=_roundoff(recipe),
            max_steps=length.steps,
            trained_batch=length.batch_size if length.batch_size < recipe.batch_size else 0,
            start=self._start,
            ranks=_describe_ranks(recipe),
            coarse=DType.FLOAT8.value if recipe.uses_float8 else "",
        )
        stalls = started + STALL_FACTOR * self._budget_seconds
        self._recorder.deadline = min(stalls, self._until)
        try:
            for reached in self._stages.of(recipe, evidence, seeds, until_failure):
                evidence = reached
        except ProofTimeout as timeout:
            self.forget()
            evidence = replace(
                evidence,
                not_covered=(*evidence.not_covered, str(timeout)),
                ended_by="the time limit" if self._until <= stalls else "a stalled machine",
                # the longer run of the candidate alone may overflow yet
                runs=() if recipe.loss_scale is not None else evidence.runs,
            )
        except Exception as error:
            if not raised_by_recipe(error):
                raise
            self.forget()
            return _rejection(error, time.monotonic() - started)
        finally:
            self._recorder.deadline = math.inf
        evidence = replace(evidence, seconds=time.monotonic() - started)
        verdict = judging.judge(evidence, self._tolerance)
        verdict = replace(verdict, curves=sample_curves((*evidence.long_runs, *evidence.runs)))
        if settings is None:
            return verdict
        return replace(
            verdict,
            covered=(*settings.verdict.covered, *verdict.covered),
            not_covered=(*settings.verdict.not_covered, *verdict.not_covered),
        )

    def compare_settings(self, recipe: Recipe) -> SettingsVerdict | None:
        """Judge whether the recipe's settings compute what plain float32 does; None without any."""
        try:
            return self._settings.prove(recipe)
        finally:
            if self._settings.failed:
                self._settings.failed = False
                self.forget()

    def _length(self, recipe: Recipe) -> ProofLength:
        """Return how far a proof of the recipe may go, and at which batch, chosen once."""
        own = recipe.batch_size
        if self._steps is not None:
            return ProofLength(self._steps, min(self._trained_batch or own, own))
        batch = f"{own}x{recipe.accumulation_steps}"
        length = self._chosen.get(batch)
        if length is None:
            pace = self._recorder.pace(recipe, PACE_SECONDS)
            step = single = pace.seconds_per_step
            smaller = proof_steps.check_batch(own, single)
            paced = self._pace_at(recipe, smaller) if smaller < own else None
            if paced is not None:
                own, step = smaller, paced
            evaluated = pace.metric is not None
            beside = (4 if evaluated else 2) * (pace.seconds - len(pace.losses) * single)
            steps = proof_steps.affordable_steps(
                step,
                self._budget_seconds,
                single,
                left=max(0.0, self._until - time.monotonic() - max(0.0, beside)),
                evaluated=evaluated,
            )
            length = self._chosen[batch] = ProofLength(steps, own)
            if steps < proof_steps.FIRST_STEPS:
                self.forget()  # its checkpoints are others than those of the run that told the pace
        return length

    def _pace_at(self, recipe: Recipe, batch_size: int) -> float | None:
        """Return the seconds of a float32 step at a smaller batch; None where it does not train."""
        try:
            run = self._tracer.trajectory(
                recipe=replace(recipe.in_float32(), batch_size=batch_size),
                seed=SEEDS[0],
                steps=PACE_STEPS,
                seconds=PACE_SECONDS,
            )
        except Exception as error:
            if not (isinstance(error, TaskError) or raised_by_recipe(error)):
                raise
            self.forget()
            return None
        return run.seconds_per_step if run.finite else None

    def tune_loss_scale(self, recipe: Recipe) -> tuple[LossScale, ScaleEvidence]:
        """Choose a float16 recipe's initial loss scale; see `loss_scale_search.tune_loss_scale`.

        The reference runs first, so that gradients are measured along the training as well. Code
        that raises under the recipe gets the default scale: rejecting it is left to the proof.
        """
        length = self._length(recipe)
        runs = self._recorder.reference(recipe, length)
        try:
            scale, evidence, run = loss_scale_search.tune_loss_scale(
                replace(recipe, batch_size=length.batch_size), self._tracer, max_steps=length.steps
            )
        except Exception as error:
            if not raised_by_recipe(error):
                raise
            self.forget()
            return loss_scale_search.default_loss_scale(
                f"the task's own code raises under it: {first_line(error)}"
            )

        if not run.skipped:  # the scale's floor and growth had no effect on this run
            runs.candidate = replace(recipe, loss_scale=scale)
            runs.candidate_runs = {SEEDS[0]: run}
        return scale, evidence

    def find_islands(self, recipe: Recipe, units: Sequence[Unit]) -> IslandSearchResult:
        """Search for the few modules that must stay in float32, and prove the recipe with them.

        Where the recipe does not run as it is, the modules that it cannot run without come first.
        """

        def prove(paths: tuple[str, ...]) -> tuple[Recipe, Verdict]:
            candidate = self._with_islands(recipe, paths)
            return candidate, self.prove(candidate, until_failure=True)

        def out_of_time() -> bool:
            return time.monotonic() >= self._until

        runnable = search_runnable(units, partial(self._run, recipe), out_of_time=out_of_time)
        if runnable.paths is None:
            return IslandSearchResult(None, None, runnable.reason, runnable.attempts)
        if runnable.paths:
            needed, verdict = prove(runnable.paths)
            kept = needed.float32_modules
            if verdict.accepted:
                reason = f"runs, and trains like float32, with {name_modules(kept)} kept in float32"
                share = product_share(units, kept)
                return IslandSearchResult(needed, verdict, reason, runnable.attempts, kept, share)
            recipe = needed
        return search_islands(
            units,
            prove,
            kept=recipe.float32_modules,
            out_of_time=out_of_time,
            on_trial=lambda number: self._on_event("islands", number),
        )

    def _run(self, recipe: Recipe, paths: tuple[str, ...]) -> RunAttempt:
        """Train one step with more modules kept in float32; say where it raised, if it did."""
        candidate = replace(recipe, float32_modules=(*recipe.float32_modules, *paths))
        try:
            self._tracer.trajectory(recipe=candidate, seed=SEEDS[0], steps=1)
        except Exception as error:
            if not raised_by_recipe(error):
                raise
            self.forget()
            return RunAttempt(paths, ran=False, raised_in=_raised_in(error))
        return RunAttempt(paths, ran=True)

    def _with_islands(self, recipe: Recipe, paths: tuple[str, ...]) -> Recipe:
        """Return the recipe with more islands, which no longer bound its loss scale."""
        candidate = replace(recipe, float32_modules=(*recipe.float32_modules, *paths))
        if recipe.loss_scale is None:
            return candidate
        length = self._length(recipe)
        self._recorder.reference(recipe, length)
        try:
            scale = loss_scale_search.loss_scale_from_backward(
                replace(candidate, batch_size=length.batch_size), self._tracer
            )
        except Exception as error:
            if not raised_by_recipe(error):
                raise
            self.forget()
            return candidate
        return replace(candidate, loss_scale=scale)


def _roundoff(recipe: Recipe) -> float:
    """Return the unit roundoff of the coarsest format that a step rounds to.

    Float8 does not count: it is allowed no more than the bfloat16 that it refines.
    """
    dtypes = [recipe.policy.compute_dtype]
    if recipe.distributed is not None:
        dtypes.append(recipe.distributed.reduce_dtype)
    return max(dtype.limits.unit_roundoff for dtype in dtypes)


def _describe_ranks(recipe: Recipe) -> str:
    """Describe what trains together: "2 ranks with DDP"; empty for one process."""
    ranks = recipe.distributed
    return "" if ranks is None else f"{ranks.world_size} ranks with {ranks.engine.upper()}"


def _raised_in(error: Exception) -> tuple[str, ...]:
    """Return the paths of the modules that an error was raised in, innermost first."""
    return error.raised_in if isinstance(error, WorkerFailure) else modules_raised_in(error)


def _rejection(error: Exception, seconds: float) -> Verdict:
    return Verdict(
        "rejected",
        f"the task's own code raises under it: {first_line(error)}",
        seconds=seconds,
        not_covered=("everything after the error",),
    )
