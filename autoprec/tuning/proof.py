"""Proves that a recipe trains like float32: runs what core's judge needs, in steps and not in time.

A `Proof` holds what is the same for every recipe at one batch (the float32 runs and what noise does
to them), so that a second recipe costs less. The tracer lives in a worker; only plain values come
back. The ladder says how many steps there are, once for each batch (`proof_steps`): once the first
ones have passed, float32 goes on for as long as its loss falls, and the candidate goes as far.
Where the first 30 steps are all, one recipe costs 110: the reference and two runs of 30 (four where
training is not close, five with a metric), four times a shadow, its float32 twin and three noisy
ones, which take no optimizer step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace

from autoprec.backends.protocol import Tracer
from autoprec.core.measurement import Unit
from autoprec.core.numerics import parity as judging
from autoprec.core.numerics import proof_steps
from autoprec.core.numerics.islands import IslandsFound, IslandTrial, NoIslandsHelp, next_islands
from autoprec.core.numerics.loss_scale import ScaleEvidence, is_near_limit
from autoprec.core.numerics.parity import (
    AT_THE_SAME_WEIGHTS,
    LONG_STEPS,
    Evidence,
    SeedRun,
    Tolerance,
    Verdict,
)
from autoprec.core.numerics.records import NoisyStep, StepComparison, Trajectory
from autoprec.core.recipe import LossScale, Recipe, describe_batch
from autoprec.errors import AutoprecError, TaskError
from autoprec.tuning import loss_scale_tuning
from autoprec.workers.failures import FailureKind, WorkerFailure

OnProgress = Callable[[str, int], None]

LATE_CHECK_STEPS = (34, 39, 44, 49, 54, 59)
NOISE_DRAWS = 3
SEEDS = (0, 1)

PACE_STEPS = 9
"""The float32 steps that tell what a step costs; the first one, which builds, does not count."""

STALL_FACTOR = 20.0
"""A proof that takes so many times what it may cost has stalled, and is not covered."""

MAX_FLOAT32_PRODUCT_SHARE = 0.9
"""The share of the matrix products in float32 beyond which islands leave nothing to gain."""


@dataclass
class _Float32Runs:
    """What was recorded of float32 at one batch."""

    reference: Trajectory
    noise: tuple[NoisyStep, ...] | None = None
    plain: dict[int, Trajectory] = field(default_factory=dict)
    noisy: dict[int, Trajectory] = field(default_factory=dict)
    points: tuple[StepComparison, ...] = ()
    candidate: Recipe | None = None
    runs: dict[int, Trajectory] = field(default_factory=dict)

    def settled(self, most: int) -> int:
        """How far float32 goes of itself; for another candidate it may have been followed further.

        That it was must not change a verdict.
        """
        return proof_steps.stopping_step(self.reference.losses, most)

    def compared(self, evidence: Evidence, steps: int) -> Evidence:
        """The evidence with the comparisons at the marks within so many steps."""
        points = [point for point in self.points if point.step < steps]
        noise = [point for point in self.noise or () if point.step < steps]
        missing = _unkept(points, steps)
        if points and not any(point.gradient_seen for point in points):
            missing.append("gradients (the training step shows none)")
        return replace(
            evidence,
            comparisons=tuple(p for p in points if p.step < proof_steps.SHORT_STEPS),
            late_comparisons=tuple(p for p in points if p.step >= proof_steps.SHORT_STEPS),
            noise=tuple(p for p in noise if p.step < proof_steps.SHORT_STEPS),
            late_noise=tuple(p for p in noise if p.step >= proof_steps.SHORT_STEPS),
            not_covered=tuple(missing),
            notes=_notes(self.reference),
        )


class _ProofTimeout(Exception):
    """The machine stalls, or the tuning's time is up: what was asked for is not covered."""

    def __init__(self, what: str, steps: int) -> None:
        super().__init__(f"{what} (no time was left at step {steps})")


def silent(phase: str, step: int) -> None:
    """Report to nobody."""


class Proof:
    """Proves recipes of one task with one tracer; see the module's docstring.

    `steps` are the most steps of a proof; without them the ladder chooses what costs at most
    `seconds`, and ends before the moment `until`, by the pace of a float32 step. `chosen` keeps
    what it chose, by batch: a proof that is repeated takes as many. `start` names the weights that
    training begins with, where they are not fresh.
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
        self._tolerance = tolerance or Tolerance()
        self._steps, self._until, self._start = steps, until, start
        self._most_seconds = proof_steps.DEFAULT_SECONDS if seconds is None else seconds
        self._chosen: MutableMapping[str, int] = {} if chosen is None else chosen
        self._known: dict[tuple[int, int], _Float32Runs] = {}
        self._deadline = math.inf

    @property
    def _seconds(self) -> float:
        """What a proof that begins now may take: no longer than `until`, which is a moment."""
        return max(0.0, min(self._most_seconds, self._until - time.monotonic()))

    def forget(self) -> None:
        """Record float32 anew: the tracer's worker was replaced."""
        self._known.clear()

    def prove(
        self, recipe: Recipe, *, seeds: Sequence[int] = SEEDS, until_failure: bool = False
    ) -> Verdict:
        """Judge `recipe` against float32 at its own micro-batch.

        Where the shadow leaves a doubt that only a longer run settles, one seed runs longer instead
        of two; and one is enough where it stays close to float32. `until_failure` leaves the
        trajectories out where the shadow has failed already.
        Code that raises under the recipe, but not in float32, is a rejection.
        """
        roundoff = recipe.policy.compute_dtype.limits.unit_roundoff
        evidence = Evidence(roundoff=roundoff, max_steps=self._most(recipe), start=self._start)
        started = time.monotonic()
        self._deadline = min(started + STALL_FACTOR * self._most_seconds, self._until)
        try:
            for reached in self._stages(recipe, evidence, seeds, until_failure):
                evidence = reached
        except _ProofTimeout as late:
            self.forget()
            missing = (*evidence.not_covered, str(late))
            evidence = replace(evidence, not_covered=missing, stalled=True)
        except Exception as error:
            if not _raised_by_recipe(error):
                raise
            self.forget()
            return _raises(error, time.monotonic() - started)
        finally:
            self._deadline = math.inf
        evidence = replace(evidence, seconds=time.monotonic() - started)
        return judging.judge(evidence, self._tolerance)

    def _stages(
        self, recipe: Recipe, evidence: Evidence, seeds: Sequence[int], until_failure: bool
    ) -> Iterator[Evidence]:
        """What is known after each stage of a proof: shadow, first steps, and what comes late."""
        known = self._reference(recipe)
        self._compare(recipe, known)
        first = min(proof_steps.FIRST_STEPS, known.settled(evidence.max_steps))
        evidence = known.compared(evidence, first)
        yield evidence
        missing, steps = list(evidence.not_covered), min(proof_steps.SHORT_STEPS, first)
        shadowed = judging.check_calibrated(
            evidence.comparisons, evidence.noise, self._tolerance, evidence.roundoff
        )
        if any(point.loss is None for point in evidence.comparisons):
            missing.append("trainings (the loss is not finite already)")
            seeds = ()
        elif seeds and shadowed.undecided in judging.DECIDED_BY_LONG_RUN:
            seeds, steps = seeds[-1:], LONG_STEPS * steps // proof_steps.SHORT_STEPS
        elif until_failure and not shadowed.passed and not shadowed.undecided:
            missing.append("trainings (it differs at the same weights already)")
            seeds = ()
        elif shadowed.passed and judging.needs_later_checkpoints(evidence.comparisons):
            later, seeds = self._look_later(recipe), seeds[:1]
            evidence = replace(evidence, headroom_comparisons=later)
        evidence = replace(evidence, not_covered=tuple(missing))
        longest = first if shadowed.passed else steps
        for seed in seeds:
            run = self._run(recipe, known, seed, steps, longest if seed == SEEDS[0] else steps)
            evidence = replace(evidence, runs=(*evidence.runs, run))
            sure = shadowed.passed and not shadowed.undecided and known.reference.metric is None
            if sure and judging.stays_close(run, self._tolerance):
                break
        yield evidence
        if seeds:
            yield from self._go_on(recipe, evidence, known)

    def _go_on(self, recipe: Recipe, evidence: Evidence, known: _Float32Runs) -> Iterator[Evidence]:
        """Follow what passed as float32's loss falls; what looks like a break, over both seeds.

        Where both lean the same way, but too little to tell, they go as far as the proof may; and
        so does what `asks_for_more` at the same weights.

        Gradients that overflow need no float32 to be compared with: there float16 goes on alone,
        and as far as the proof may go where a step was skipped or they come near the limit.
        """
        if not judging.judge(evidence, self._tolerance).accepted:
            return
        steps, most = (
            min(proof_steps.FIRST_STEPS, known.settled(evidence.max_steps)),
            evidence.max_steps,
        )
        if recipe.loss_scale is not None:
            alone = max(steps, loss_scale_tuning.confirmation_steps(most))
            run = self._candidate(recipe, known, SEEDS[0], alone)
            grows = judging.magnitudes_grow((*evidence.comparisons, *evidence.late_comparisons))
            if run.skipped or grows or is_near_limit(recipe.loss_scale):
                run = self._candidate(recipe, known, SEEDS[0], most)
            evidence = replace(evidence, candidate_run=run)
            yield evidence
        if not proof_steps.has_ended(known.reference.losses, most):
            self._extend(recipe, known, stop_at_plateau=True)
        steps = known.settled(most)
        evidence = known.compared(evidence, steps)
        if steps < most and judging.needs_longest_run(evidence, self._tolerance):
            if len(known.reference.losses) < most:
                self._extend(recipe, known, stop_at_plateau=False)
            steps = min(most, len(known.reference.losses))
            evidence = known.compared(evidence, steps)
        if steps <= proof_steps.SHORT_STEPS:
            return
        long = self._long_run(recipe, known, SEEDS[0], steps, noisy=False)
        evidence = replace(evidence, long_runs=(long,))
        yield evidence
        if not judging.needs_second_seed(long, self._tolerance):
            return
        for length in (steps, most):
            runs = [self._long_run(recipe, known, seed, length, noisy=True) for seed in SEEDS]
            evidence = replace(evidence, long_runs=tuple(runs))
            yield evidence
            if not judging.needs_more_steps(runs, self._tolerance):
                return

    def _compare(self, recipe: Recipe, known: _Float32Runs) -> None:
        """The shadow at every mark of the float32 run, and what noise does there."""
        known.points = self._tracer.shadow(recipe=recipe)
        if known.noise is None and not any(point.loss is None for point in known.points):
            known.noise = self._tracer.noise(draws=NOISE_DRAWS)

    def _extend(self, recipe: Recipe, known: _Float32Runs, *, stop_at_plateau: bool) -> None:
        """Follow float32 as far as the proof may, or its loss falls, and compare there, too.

        Where it breaks by itself, what comes before that is all that there is to compare with.
        """
        reference = self._follow(recipe, self._most(recipe), stop_at_plateau=stop_at_plateau)
        if not reference.finite:
            self.forget()
            return
        known.reference = known.plain[SEEDS[0]] = reference
        known.noise = None
        self._compare(recipe, known)

    def _most(self, recipe: Recipe) -> int:
        """The most steps of a proof at a recipe's batch, chosen once."""
        if self._steps is not None:
            return self._steps
        batch = f"{recipe.batch_size}x{recipe.accumulation_steps}"
        steps = self._chosen.get(batch)
        if steps is None:
            run = self._tracer.trajectory(recipe=_plain(recipe), seed=SEEDS[0], steps=PACE_STEPS)
            steps = self._chosen[batch] = proof_steps.affordable_steps(
                run.seconds_per_step, self._seconds
            )
        return steps

    def _reference(self, recipe: Recipe) -> _Float32Runs:
        """The float32 run with its checkpoints; the tracer keeps those of the last call only."""
        key = (recipe.batch_size, recipe.accumulation_steps)
        known = self._known.get(key)
        if known is None:
            self._known.clear()
            reference = self._follow(recipe, min(proof_steps.FIRST_STEPS, self._most(recipe)))
            _check_reference(reference, recipe)
            known = self._known[key] = _Float32Runs(reference, plain={SEEDS[0]: reference})
        return known

    def _follow(self, recipe: Recipe, steps: int, *, stop_at_plateau: bool = True) -> Trajectory:
        """float32 for so many steps, or while its loss falls; weights kept at the marks."""
        reference = self._tracer.reference(
            batch_size=recipe.batch_size,
            accumulation_steps=recipe.accumulation_steps,
            steps=steps,
            checkpoints=proof_steps.checkpoint_steps(steps),
            seconds=self._left(),
            stop_at_plateau=stop_at_plateau,
        )
        made = len(reference.losses)
        if not (
            proof_steps.has_ended(reference.losses, steps) if stop_at_plateau else made == steps
        ):
            raise _ProofTimeout("everything", made)
        return reference

    def _look_later(self, recipe: Recipe) -> tuple[StepComparison, ...]:
        """The shadow further on: numbers that grow may stop before they overflow."""
        self.forget()
        run = self._tracer.reference(
            batch_size=recipe.batch_size,
            accumulation_steps=recipe.accumulation_steps,
            steps=LATE_CHECK_STEPS[-1] + 1,
            checkpoints=LATE_CHECK_STEPS,
            seconds=self._left(),
        )
        self._whole(run, LATE_CHECK_STEPS[-1] + 1)
        return self._tracer.shadow(recipe=recipe)

    def _run(
        self, recipe: Recipe, known: _Float32Runs, seed: int, steps: int, longest: int
    ) -> SeedRun:
        """One seed's first `steps`; the candidate makes the `longest` run of it at once."""
        # What noise does to a loss is much the same for every seed; a metric of few samples jumps.
        calibrating = not known.noisy or seed in known.noisy
        calibrating = known.reference.metric is not None or (
            calibrating and steps <= proof_steps.SHORT_STEPS
        )
        run = self._candidate(recipe, known, seed, max(steps, longest))
        plain = self._float32(known.plain, recipe, seed, steps, noisy=False)
        noisy = self._float32(known.noisy, recipe, seed, steps, noisy=True) if calibrating else None
        return SeedRun(
            _truncated(plain, steps),
            _truncated(run, steps),
            None if noisy is None else _truncated(noisy, steps),
        )

    def _long_run(
        self, recipe: Recipe, known: _Float32Runs, seed: int, steps: int, *, noisy: bool
    ) -> SeedRun:
        """One seed's run of so many steps."""
        run = _truncated(self._candidate(recipe, known, seed, steps), steps)
        plain = _truncated(self._float32(known.plain, recipe, seed, steps, noisy=False), steps)
        if not noisy:
            return SeedRun(plain, run)
        noise = self._float32(known.noisy, recipe, seed, steps, noisy=True)
        return SeedRun(plain, run, _truncated(noise, steps))

    def _candidate(self, recipe: Recipe, known: _Float32Runs, seed: int, steps: int) -> Trajectory:
        """The recipe's own run, the longest one so far where that is long enough."""
        if known.candidate != recipe:
            known.candidate, known.runs = recipe, {}
        if _is_shorter(known.runs, seed, steps):
            known.runs[seed] = self._train(recipe, seed, steps)
        return known.runs[seed]

    def _float32(
        self, kept: dict[int, Trajectory], recipe: Recipe, seed: int, steps: int, *, noisy: bool
    ) -> Trajectory:
        if _is_shorter(kept, seed, steps):
            kept[seed] = self._train(_plain(recipe), seed, steps, noisy=noisy)
        return kept[seed]

    def _train(self, recipe: Recipe, seed: int, steps: int, *, noisy: bool = False) -> Trajectory:
        run = self._tracer.trajectory(
            recipe=recipe, seed=seed, steps=steps, noisy=noisy, seconds=self._left()
        )
        return self._whole(run, steps)

    def _whole(self, run: Trajectory, steps: int) -> Trajectory:
        """A run that was made to its end; one that was cut is not judged at all."""
        if len(run.losses) < steps:
            raise _ProofTimeout(f"a training of {steps} steps", len(run.losses))
        return run

    def _left(self) -> float | None:
        """The seconds until a proof has stalled; None outside of one."""
        if math.isinf(self._deadline):
            return None
        return max(0.0, self._deadline - time.monotonic())

    def tune_loss_scale(self, recipe: Recipe) -> tuple[LossScale, ScaleEvidence]:
        """Choose a float16 recipe's initial loss scale; see `scaling.tune_loss_scale`.

        The reference runs first, so that gradients are measured along the training, too. Code that
        raises under the recipe gets the usual scale: it is for the proof to reject it.
        """
        known, most = self._reference(recipe), self._most(recipe)
        try:
            scale, evidence, run = loss_scale_tuning.tune_loss_scale(
                recipe, self._tracer, max_steps=most
            )
        except Exception as error:
            if not _raised_by_recipe(error):
                raise
            self.forget()
            return loss_scale_tuning.default_loss_scale(
                f"the task's own code raises under it: {_first_line(error)}"
            )

        if not run.skipped:  # then the floor and the growth of the scale had no part in it
            known.candidate, known.runs = replace(recipe, loss_scale=scale), {SEEDS[0]: run}
        return scale, evidence

    def find_islands(self, recipe: Recipe, units: Sequence[Unit]) -> Islands:
        """Look for the few modules that must stay in float32, and prove the mended recipe."""
        history: list[IslandTrial] = []
        proven: dict[tuple[str, ...], tuple[Recipe, Verdict]] = {}
        while True:
            step = next_islands(units, history)
            if isinstance(step, NoIslandsHelp):
                return Islands(None, None, step.reason, len(history), _tried(history))
            if isinstance(step, IslandsFound):
                break
            if time.monotonic() >= self._until:
                reason = "the time limit left no more to look for what mends it"
                return Islands(None, None, reason, len(history), _tried(history))
            self._on_event("islands", len(history))
            mended = self._with_islands(recipe, step)
            verdict = self.prove(mended, until_failure=True)
            proven[_key(step)] = mended, verdict
            history.append(IslandTrial(step, verdict.accepted))
        mended, verdict = proven[_key(step.paths)]
        share = sum(unit.products for unit in units if unit.path in step.paths)
        if share > MAX_FLOAT32_PRODUCT_SHARE:
            reason = (
                f"it trains like float32 only with {100 * share:.3g} % of its matrix products in "
                "float32, which is float32 with casts"
            )
            return Islands(None, None, reason, len(history), _tried(history), share)
        names = ", ".join(path or "the model's own forward" for path in step.paths)
        reason = f"trains like float32 with {names} (or a neighbour of it) kept in float32"
        return Islands(mended, verdict, reason, len(history), _tried(history), share)

    def _with_islands(self, recipe: Recipe, paths: tuple[str, ...]) -> Recipe:
        """The recipe with islands; what stays in float32 no longer bounds the loss scale."""
        mended = replace(recipe, float32_modules=paths)
        if recipe.loss_scale is None:
            return mended
        self._reference(recipe)
        try:
            return replace(
                mended, loss_scale=loss_scale_tuning.loss_scale_from_backward(mended, self._tracer)
            )
        except Exception as error:
            if not _raised_by_recipe(error):
                raise
            self.forget()
            return mended


@dataclass(frozen=True)
class Islands:
    """What the search for islands found: a mended recipe (None: nothing mends it) and its verdict.

    `products` is the share of the model's matrix-product work that stays in float32.
    """

    recipe: Recipe | None
    verdict: Verdict | None
    reason: str
    trials: int
    tried: tuple[str, ...] = ()
    products: float = 0.0


def _key(paths: Sequence[str]) -> tuple[str, ...]:
    """The same key for the same set of islands in any order."""
    return tuple(sorted(paths))


def _tried(history: Sequence[IslandTrial]) -> tuple[str, ...]:
    """Every unit that was tried as an island."""
    return tuple(dict.fromkeys(path for tried in history for path in tried.paths))


def _plain(recipe: Recipe) -> Recipe:
    """float32 at the recipe's batch."""
    return replace(
        Recipe(batch_size=recipe.batch_size), accumulation_steps=recipe.accumulation_steps
    )


def _is_shorter(kept: Mapping[int, Trajectory], seed: int, steps: int) -> bool:
    """Whether no run of the seed is that long."""
    return seed not in kept or len(kept[seed].losses) < steps


def _truncated(run: Trajectory, steps: int) -> Trajectory:
    """The first steps of a run; a metric belongs to its end only."""
    if len(run.losses) <= steps:
        return run
    return replace(run, losses=run.losses[:steps], metric=None)


def _check_reference(reference: Trajectory, recipe: Recipe) -> None:
    """Raise where float32 itself does not stay finite: then nothing can be compared with it."""
    if reference.finite:
        return
    step = reference.losses.index(None)
    raise TaskError(
        f"in float32 the loss is inf or NaN at step {step} (counted from 0) at "
        f"{describe_batch(recipe.batch_size, recipe.accumulation_steps)}, so nothing can be proven "
        "against it. "
        "Look for inf or NaN in that batch of build_data, or lower the learning rate"
    )


def _raised_by_recipe(error: Exception) -> bool:
    """Whether this is the user's code failing under the recipe, rather than us or the machine."""
    if isinstance(error, WorkerFailure):
        return error.kind in (
            FailureKind.USER_ERROR,
            FailureKind.UNSUPPORTED,
            FailureKind.NONFINITE,
        )
    return not isinstance(error, AutoprecError | MemoryError | OSError)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


def _raises(error: Exception, seconds: float) -> Verdict:
    return Verdict(
        "rejected",
        f"the task's own code raises under it: {_first_line(error)}",
        seconds=seconds,
        not_covered=("everything after the error",),
    )


def _unkept(points: Sequence[StepComparison], steps: int) -> list[str]:
    """What to say of checkpoints that the tracer had no memory for."""
    seen = {point.step for point in points}
    unkept = [str(step) for step in proof_steps.checkpoint_steps(steps) if step not in seen]
    return [
        f"{AT_THE_SAME_WEIGHTS} at steps {', '.join(unkept)} (no memory to keep the weights)"
    ] * bool(unkept)


def _notes(reference: Trajectory) -> tuple[str, ...]:
    if reference.reproducible:
        return ()
    return ("build_data gives other data each time: the first ones were kept and replayed",)
