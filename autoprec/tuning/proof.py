"""Proves that a recipe trains like float32: runs what core's judge needs, within a time limit.

A `Proof` holds what is the same for every recipe at one batch (the float32 runs and what noise does
to them), so that a second recipe costs less. The tracer lives in a worker; only plain values come
back. One recipe costs less than 200 steps: the reference and four runs of 30 (five with a metric),
four times a shadow, its float32 twin and three noisy ones, which take no optimizer step. Where the
candidate is so slow that it would take longer than 200 steps of float32, its runs are cut: the
second seed's first, for one longer run shows more than two short ones. What building, tracing and
compiling take is not counted there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoprec.backends.base import Tracer
from autoprec.core import judge as judging
from autoprec.core.checks import Check
from autoprec.core.islands import Found, Impossible, Tried, next_islands
from autoprec.core.judge import (
    AT_THE_SAME_WEIGHTS,
    LONG_STEPS,
    MIN_STEPS,
    Evidence,
    SeedRun,
    Tolerance,
    Verdict,
)
from autoprec.core.loss_scale import ScaleEvidence
from autoprec.core.measurement import Unit
from autoprec.core.recipe import LossScale, Recipe, batch_in_words
from autoprec.core.trace import NoisePoint, ShadowPoint, Trajectory
from autoprec.errors import AutoprecError, TaskError
from autoprec.tuning import scaling
from autoprec.tuning.allowance import Allowance
from autoprec.tuning.failures import FailureKind, WorkerFailure

OnEvent = Callable[[str, int], None]

CHECKPOINTS = (0, 2, 8, 29)
LATER = (34, 39, 44, 49, 54, 59)
STEPS = 30
NOISE_DRAWS = 3
SEEDS = (0, 1)

MOST_STEPS, MOST_SECONDS = 170, 60.0
"""Unless told otherwise a proof takes no longer than 200 float32 steps, or so many seconds. What is
left of 200 is for what is no step: copying weights, comparing gradients, slow first steps. A recipe
as fast as float32 needs just this: reference and shadow 30 and 20, two seeds' runs 60 each."""

MOST_PRODUCTS = 0.9
"""The share of the matrix products in float32 beyond which islands leave nothing to gain."""


@dataclass
class _Known:
    """What was recorded of float32 at one batch."""

    reference: Trajectory
    noise: tuple[NoisePoint, ...] | None = None
    plain: dict[int, Trajectory] = field(default_factory=dict)
    noisy: dict[int, Trajectory] = field(default_factory=dict)


def silent(phase: str, step: int) -> None:
    """Report to nobody."""


class Proof:
    """Proves recipes of one task with one tracer; see the module's docstring."""

    def __init__(
        self,
        tracer: Tracer,
        *,
        tolerance: Tolerance | None = None,
        seconds: float | None = None,
        until: float = math.inf,
        on_event: OnEvent = silent,
    ) -> None:
        self._tracer, self._on_event = tracer, on_event
        self._tolerance = tolerance or Tolerance()
        self._told = seconds is not None
        self._most = MOST_SECONDS if seconds is None else seconds
        self._until = until
        self._known: dict[tuple[int, int], _Known] = {}

    @property
    def _seconds(self) -> float:
        """What a proof that begins now may take: no longer than `until`, which is a moment."""
        return max(0.0, min(self._most, self._until - time.monotonic()))

    def forget(self) -> None:
        """Record float32 anew: the tracer's worker was replaced."""
        self._known.clear()

    def prove(
        self, recipe: Recipe, *, seeds: Sequence[int] = SEEDS, until_failure: bool = False
    ) -> Verdict:
        """Judge `recipe` against float32 at its own micro-batch.

        Where the shadow leaves a doubt that only a longer run settles, one seed runs longer instead
        of two. `until_failure` leaves the trajectories out where the shadow has failed already.
        Code that raises under the recipe, but not in float32, is a rejection.
        """
        started = time.monotonic()
        missing: list[str] = []
        known = self._reference(recipe, missing)
        allowance = self._allowance(started, known.reference)
        points: tuple[ShadowPoint, ...] = ()
        later: tuple[ShadowPoint, ...] = ()
        runs: list[SeedRun] = []
        try:
            began = time.monotonic()
            points = self._tracer.shadow(recipe=recipe)
            twins = 1 if known.noise is not None else 1 + NOISE_DRAWS
            allowance.compared(len(points), twins, time.monotonic() - began)
            missing += _unkept(points, len(known.reference.losses))
            if points and not any(point.gradient_seen for point in points):
                missing.append("gradients (the training step shows none)")
            if any(point.loss is None for point in points):
                missing.append("trajectories (the loss is not finite already)")
                seeds = ()
            elif known.noise is None:
                known.noise = self._tracer.noise(draws=NOISE_DRAWS)
            shadowed = self._shadowed(recipe, points, known)
            steps = STEPS
            if seeds and shadowed.doubt in judging.LONG_LOOK:
                seeds, steps = seeds[-1:], LONG_STEPS
            elif until_failure and not shadowed.passed and not shadowed.doubt:
                missing.append("trajectories (the shadow test failed already)")
                seeds = ()
            elif shadowed.passed and judging.wants_later_look(points):
                later, seeds = self._look_later(recipe, allowance, missing), seeds[:1]
            for seed in seeds:
                run = self._run(recipe, known, seed, steps, allowance, missing)
                runs += [run] if run is not None else []
        except Exception as error:
            if not _raised_by_recipe(error):
                raise
            self.forget()
            return _raises(error, time.monotonic() - started)
        evidence = Evidence(
            shadow=points,
            later=later,
            noise=known.noise or (),
            runs=tuple(runs),
            seconds=time.monotonic() - started,
            not_covered=tuple(missing),
            notes=_notes(known.reference),
            roundoff=recipe.policy.compute_dtype.limits.unit_roundoff,
        )
        return judging.judge(evidence, self._tolerance)

    def _allowance(self, started: float, reference: Trajectory) -> Allowance:
        """How long the candidate's runs and their float32 twins may take."""
        steps = None if self._told else MOST_STEPS
        return Allowance(min(started + self._most, self._until), reference, steps)

    def _shadowed(self, recipe: Recipe, points: Sequence[ShadowPoint], known: _Known) -> Check:
        roundoff = recipe.policy.compute_dtype.limits.unit_roundoff
        return judging.calibrated_shadow(points, known.noise or (), self._tolerance, roundoff)

    def _reference(self, recipe: Recipe, missing: list[str]) -> _Known:
        """The float32 run with its checkpoints; the tracer keeps those of the last call only."""
        key = (recipe.batch_size, recipe.accumulation_steps)
        known = self._known.get(key)
        if known is None:
            self._known.clear()
            reference = self._tracer.reference(
                batch_size=recipe.batch_size,
                accumulation_steps=recipe.accumulation_steps,
                steps=STEPS,
                checkpoints=CHECKPOINTS,
                seconds=self._seconds * 0.2,
            )
            _check_reference(reference, recipe)
            known = self._known[key] = _Known(reference, plain={0: reference})
        steps = len(known.reference.losses)
        late = [str(step) for step in CHECKPOINTS if step >= steps]
        if late:
            missing.append(_unseen(f"{AT_THE_SAME_WEIGHTS} at steps {', '.join(late)}"))
        return known

    def _look_later(
        self, recipe: Recipe, allowance: Allowance, missing: list[str]
    ) -> tuple[ShadowPoint, ...]:
        """The shadow further on: numbers that grow may stop before they overflow."""
        self.forget()
        run = self._tracer.reference(
            batch_size=recipe.batch_size,
            accumulation_steps=recipe.accumulation_steps,
            steps=LATER[-1] + 1,
            checkpoints=LATER,
            seconds=allowance.seconds,
        )
        seen = sum(step < len(run.losses) for step in LATER)
        allowance.spend(len(run.losses) + seen)
        if seen < len(LATER):
            steps = ", ".join(map(str, LATER[seen:]))
            missing.append(_unseen(f"{AT_THE_SAME_WEIGHTS} at steps {steps}"))
        return self._tracer.shadow(recipe=recipe) if seen else ()

    def _run(
        self,
        recipe: Recipe,
        known: _Known,
        seed: int,
        steps: int,
        allowance: Allowance,
        missing: list[str],
    ) -> SeedRun | None:
        """One seed's runs, as long as the time that is left allows."""
        # What noise does to a loss is much the same for every seed; a metric of few samples jumps.
        calibrating = not known.noisy or seed in known.noisy
        calibrating = known.reference.metric is not None or (calibrating and steps == STEPS)
        cut_short = len(known.reference.losses) < STEPS
        most = len(known.reference.losses) if cut_short else steps
        twins = _lacks(known.plain, seed, most) + (calibrating and _lacks(known.noisy, seed, most))
        run = None
        if allowance.worth_a_run(twins):
            run = self._tracer.trajectory(
                recipe=recipe,
                seed=seed,
                steps=most,
                seconds=allowance.seconds,
                reserve=twins * known.reference.pace,
            )
            allowance.ran(run)
            most = len(run.losses)
        if run is None or most < MIN_STEPS:
            missing.append(_unseen(f"the short training with seed {seed}"))
            return None
        plain = self._float32(known.plain, recipe, seed, most, noisy=False)
        noisy = None
        if calibrating:
            noisy = self._float32(known.noisy, recipe, seed, most, noisy=True)
        allowance.spend(twins * most)
        if most < steps:
            missing.append(
                _unseen(f"steps {most} to {steps} of the short training with seed {seed}")
            )
        cut = _cut(run, most), None if noisy is None else _cut(noisy, most)
        return SeedRun(_cut(plain, most), *cut)

    def _float32(
        self, kept: dict[int, Trajectory], recipe: Recipe, seed: int, steps: int, *, noisy: bool
    ) -> Trajectory:
        if _lacks(kept, seed, steps):
            float32 = replace(
                Recipe(batch_size=recipe.batch_size), accumulation_steps=recipe.accumulation_steps
            )
            kept[seed] = self._tracer.trajectory(
                recipe=float32, seed=seed, steps=steps, noisy=noisy
            )
        return kept[seed]

    def tune_loss_scale(self, recipe: Recipe) -> tuple[LossScale, ScaleEvidence]:
        """Choose a float16 recipe's initial loss scale; see `scaling.tune_loss_scale`.

        The reference runs first, so that gradients are measured along the training, too. Code that
        raises under the recipe gets the usual scale: it is for the proof to reject it.
        """
        self._reference(recipe, [])
        try:
            return scaling.tune_loss_scale(recipe, self._tracer, seconds=self._seconds / 3)
        except Exception as error:
            if not _raised_by_recipe(error):
                raise
            self.forget()
            return scaling.unmeasured(f"the task's own code raises under it: {_first_line(error)}")

    def find_islands(self, recipe: Recipe, units: Sequence[Unit]) -> Islands:
        """Look for the few modules that must stay in float32, and prove the mended recipe."""
        history: list[Tried] = []
        proven: dict[tuple[str, ...], tuple[Recipe, Verdict]] = {}
        while True:
            step = next_islands(units, history)
            if isinstance(step, Impossible):
                return Islands(None, None, step.reason, len(history), _tried(history))
            if isinstance(step, Found):
                break
            if time.monotonic() >= self._until:
                reason = "the time limit left no more to look for what mends it"
                return Islands(None, None, reason, len(history), _tried(history))
            self._on_event("islands", len(history))
            mended = self._with_islands(recipe, step)
            verdict = self.prove(mended, until_failure=True)
            proven[_key(step)] = mended, verdict
            history.append(Tried(step, verdict.accepted))
        mended, verdict = proven[_key(step.paths)]
        share = sum(unit.products for unit in units if unit.path in step.paths)
        if share > MOST_PRODUCTS:
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
        self._reference(recipe, [])
        try:
            return replace(mended, loss_scale=scaling.analytic(mended, self._tracer))
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


def _tried(history: Sequence[Tried]) -> tuple[str, ...]:
    """Every unit that was tried as an island."""
    return tuple(dict.fromkeys(path for tried in history for path in tried.paths))


def _lacks(kept: Mapping[int, Trajectory], seed: int, steps: int) -> bool:
    """Whether no run of the seed is that long."""
    return seed not in kept or len(kept[seed].losses) < steps


def _unseen(what: str) -> str:
    return f"{what} (no time was left)"


def _cut(run: Trajectory, steps: int) -> Trajectory:
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
        f"{batch_in_words(recipe.batch_size, recipe.accumulation_steps)}, so nothing can be proven "
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


def _unkept(points: Sequence[ShadowPoint], steps: int) -> list[str]:
    """What to say of checkpoints that the tracer had no memory for."""
    seen = {point.step for point in points}
    unkept = [str(step) for step in CHECKPOINTS if step < steps and step not in seen]
    return [f"shadow at steps {', '.join(unkept)} (no memory to keep the weights)"] * bool(unkept)


def _notes(reference: Trajectory) -> tuple[str, ...]:
    if reference.reproducible:
        return ()
    return ("build_data gives other data each time: the first ones were kept and replayed",)
