"""Proves that a recipe trains like float32: makes the runs that core's judge needs.

How far a proof goes is counted in steps, never in time, and chosen once for each batch
(`core.numerics.proof_steps`): once the first steps have passed, float32 is trained for as long as
its loss falls, and the candidate as far. Where the first 30 steps are all, one recipe costs 110:
the reference and two runs of 30 (four where training is not close, five with a metric), and at four
checkpoints a step of the candidate, its float32 twin and three perturbed ones, which take no
optimizer step. The tracer lives in a worker; only plain values come back.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from dataclasses import replace
from functools import partial

from autoprec.backends.protocol import Tracer
from autoprec.backends.shared.raising_modules import modules_raised_in
from autoprec.core.dtypes import DType
from autoprec.core.measurement import Unit
from autoprec.core.numerics import parity as judging
from autoprec.core.numerics import proof_steps
from autoprec.core.numerics.curve_samples import sample_curves
from autoprec.core.numerics.exact_settings import SettingsVerdict
from autoprec.core.numerics.headroom import needs_later_checkpoints
from autoprec.core.numerics.late_failures import (
    magnitudes_grow,
    needs_more_steps,
    needs_second_seed,
)
from autoprec.core.numerics.loss_origin import above_origin
from autoprec.core.numerics.loss_scale import ScaleEvidence, is_near_limit
from autoprec.core.numerics.noise_scale import NoiseScale
from autoprec.core.numerics.parity import LONG_STEPS
from autoprec.core.numerics.reference_recipe import is_exact
from autoprec.core.numerics.runnable import RunAttempt
from autoprec.core.numerics.tolerance import Tolerance
from autoprec.core.numerics.verdict import ProofEvidence, Verdict
from autoprec.core.recipe import LossScale, Recipe
from autoprec.errors import first_line
from autoprec.tuning.proof import loss_scale_search
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
    RecordedRuns,
    RunRecorder,
    float32_of,
)
from autoprec.tuning.proof.settings_proof import SettingsProof, raised_by_recipe
from autoprec.workers.failures import WorkerFailure

OnProgress = Callable[[str, int], None]

PACE_STEPS = 9
"""The float32 steps that tell what a step costs; the first one, which builds, does not count."""

STALL_FACTOR = 20.0
"""A proof that takes this many times its time budget has stalled; the rest is not covered."""


def silent(phase: str, step: int) -> None:
    """Report nothing."""


class Proof:
    """Proves recipes of one task with one tracer.

    `steps` is the maximum number of steps of a proof; without it, as many steps are chosen as cost
    at most `seconds` at the speed of a float32 step, and as end before the clock reading `until`.
    `chosen` keeps that number by batch: a repeated proof takes as many. `start` names the weights
    that training begins with, where they are not fresh.
    """

    def __init__(
        self,
        tracer: Tracer,
        *,
        tolerance: Tolerance | None = None,
        steps: int | None = None,
        seconds: float | None = None,
        chosen: MutableMapping[str, int] | None = None,
        start: str = "",
        until: float = math.inf,
        on_event: OnProgress = silent,
    ) -> None:
        self._tracer, self._on_event = tracer, on_event
        self._recorder = RunRecorder(tracer)
        self._settings = SettingsProof(tracer)
        self._tolerance = tolerance or Tolerance()
        self._steps, self._until, self._start = steps, until, start
        self._budget_seconds = proof_steps.DEFAULT_SECONDS if seconds is None else seconds
        self._chosen: MutableMapping[str, int] = {} if chosen is None else chosen

    def forget(self) -> None:
        """Record float32 again: the tracer's worker was replaced."""
        self._recorder.forget()

    def noise_scale(self, recipe: Recipe) -> NoiseScale | None:
        """Return the gradient noise scale that the proof saw at the recipe's batch, if it did."""
        return self._recorder.noise_scale(recipe)

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
        evidence = ProofEvidence(
            roundoff=_roundoff(recipe),
            max_steps=self._max_steps(recipe),
            start=self._start,
            ranks=_describe_ranks(recipe),
            coarse=DType.FLOAT8.value if recipe.uses_float8 else "",
        )
        self._recorder.deadline = min(started + STALL_FACTOR * self._budget_seconds, self._until)
        try:
            for reached in self._stages(recipe, evidence, seeds, until_failure):
                evidence = reached
        except ProofTimeout as timeout:
            self.forget()
            missing = (*evidence.not_covered, str(timeout))
            evidence = replace(evidence, not_covered=missing, stalled=True)
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

    def _stages(
        self, recipe: Recipe, evidence: ProofEvidence, seeds: Sequence[int], until_failure: bool
    ) -> Iterator[ProofEvidence]:
        """Yield the evidence after each stage: same weights, first steps, longer runs."""
        recorder = self._recorder
        runs = recorder.reference(recipe, evidence.max_steps)
        recorder.compare(recipe, runs)
        first = min(proof_steps.FIRST_STEPS, runs.stopping_step(evidence.max_steps))
        evidence = runs.compared(evidence, first)
        yield evidence
        missing, steps = list(evidence.not_covered), min(proof_steps.SHORT_STEPS, first)
        check = judging.check_first_steps(evidence, self._tolerance)
        if any(each.loss is None for each in evidence.comparisons):
            missing.append("trainings (the loss is not finite already)")
            seeds = ()
        elif seeds and check.undecided in judging.DECIDED_BY_LONG_RUN:
            seeds, steps = seeds[-1:], LONG_STEPS * steps // proof_steps.SHORT_STEPS
        elif until_failure and not check.passed and not check.undecided:
            missing.append("trainings (it differs at the same weights already)")
            seeds = ()
        elif until_failure and not judging.check_all_buffers(evidence, self._tolerance).passed:
            missing.append("trainings (it leaves other buffers already)")
            seeds = ()
        elif check.passed and needs_later_checkpoints(evidence.comparisons):
            later, seeds = recorder.compare_late(recipe), seeds[:1]
            evidence = replace(evidence, headroom_comparisons=later)
        evidence = replace(evidence, not_covered=tuple(missing))
        longest = first if check.passed else steps
        for seed in seeds:
            run = recorder.seed_run(
                recipe, runs, seed, steps, longest if seed == SEEDS[0] else steps
            )
            evidence = replace(evidence, runs=(*evidence.runs, run))
            decided = check.passed and not check.undecided and runs.reference.metric is None
            if decided and judging.stays_close(above_origin(evidence).runs[-1], self._tolerance):
                break
        yield evidence
        if seeds:
            yield from self._longer_runs(recipe, evidence, runs)

    def _longer_runs(
        self, recipe: Recipe, evidence: ProofEvidence, runs: RecordedRuns
    ) -> Iterator[ProofEvidence]:
        """Yield the evidence of longer runs of a recipe that passed so far.

        It is followed for as long as float32's loss falls, and over both seeds where it seems to
        break. Where both lean the same way, but too little to tell, they go to the maximum steps,
        and so does a recipe for which `needs_longest_run` says so at the same weights.

        Gradients that overflow need no float32 to be compared with: there float16 continues alone,
        and to the maximum steps where a step was skipped or the scale is near its limit.
        """
        if not judging.judge(evidence, self._tolerance).accepted:
            return
        recorder, most = self._recorder, evidence.max_steps
        steps = min(proof_steps.FIRST_STEPS, runs.stopping_step(most))
        if recipe.loss_scale is not None:
            alone = max(steps, loss_scale_search.confirmation_steps(most))
            run = recorder.candidate_run(recipe, runs, SEEDS[0], alone)
            grows = magnitudes_grow((*evidence.comparisons, *evidence.late_comparisons))
            if run.skipped or grows or is_near_limit(recipe.loss_scale):
                run = recorder.candidate_run(recipe, runs, SEEDS[0], most)
            evidence = replace(evidence, candidate_run=run)
            yield evidence
        if not proof_steps.has_ended(runs.reference.losses, most):
            recorder.extend(recipe, runs, most, stop_at_plateau=True)
        steps = runs.stopping_step(most)
        evidence = runs.compared(evidence, steps)
        if steps < most and judging.needs_longest_run(evidence, self._tolerance):
            if len(runs.reference.losses) < most:
                recorder.extend(recipe, runs, most, stop_at_plateau=False)
            steps = min(most, len(runs.reference.losses))
            evidence = runs.compared(evidence, steps)
        if steps <= proof_steps.SHORT_STEPS:
            return
        long = recorder.long_run(recipe, runs, SEEDS[0], steps, noisy=False)
        evidence = replace(evidence, long_runs=(long,))
        yield evidence
        if not needs_second_seed(above_origin(evidence).long_runs[0], self._tolerance):
            return
        for length in (steps, most):
            both = [recorder.long_run(recipe, runs, seed, length, noisy=True) for seed in SEEDS]
            evidence = replace(evidence, long_runs=tuple(both))
            yield evidence
            if not needs_more_steps(above_origin(evidence).long_runs, self._tolerance):
                return

    def _max_steps(self, recipe: Recipe) -> int:
        """Return the maximum steps of a proof at the recipe's batch, chosen once."""
        if self._steps is not None:
            return self._steps
        batch = f"{recipe.batch_size}x{recipe.accumulation_steps}"
        steps = self._chosen.get(batch)
        if steps is None:
            run = self._tracer.trajectory(
                recipe=float32_of(recipe), seed=SEEDS[0], steps=PACE_STEPS
            )
            left = max(0.0, min(self._budget_seconds, self._until - time.monotonic()))
            steps = proof_steps.affordable_steps(run.seconds_per_step, left)
            self._chosen[batch] = steps
        return steps

    def tune_loss_scale(self, recipe: Recipe) -> tuple[LossScale, ScaleEvidence]:
        """Choose a float16 recipe's initial loss scale; see `loss_scale_search.tune_loss_scale`.

        The reference runs first, so that gradients are measured along the training as well. Code
        that raises under the recipe gets the default scale: rejecting it is left to the proof.
        """
        most = self._max_steps(recipe)
        runs = self._recorder.reference(recipe, most)
        try:
            scale, evidence, run = loss_scale_search.tune_loss_scale(
                recipe, self._tracer, max_steps=most
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
        self._recorder.reference(recipe, self._max_steps(recipe))
        try:
            scale = loss_scale_search.loss_scale_from_backward(candidate, self._tracer)
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
