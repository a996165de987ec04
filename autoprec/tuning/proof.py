"""Proves that a recipe trains like float32: runs what core's judge needs, within a time limit.

A `Proof` holds what is the same for every recipe at one batch (the float32 runs and what noise does
to them), so that a second recipe costs less. The tracer lives in a worker; only plain values come
back. Costs at most about 200 float32 steps: 33 of the reference, 4 shadows with 12 noise draws,
and five runs of 30 steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from autoprec.backends.base import Tracer
from autoprec.core.islands import Found, Impossible, Tried, next_islands
from autoprec.core.judge import MIN_STEPS, Evidence, SeedRun, Tolerance, Verdict, judge
from autoprec.core.loss_scale import (
    ScaleEvidence,
    candidates,
    initial_exponent,
    largest_safe_exponent,
    loss_scale,
    objective,
    underflow,
)
from autoprec.core.measurement import Unit
from autoprec.core.recipe import LossScale, Recipe
from autoprec.core.trace import NoisePoint, ShadowPoint, Trajectory

OnEvent = Callable[[str, int], None]

CHECKPOINTS = (0, 2, 8, 32)
REFERENCE_STEPS = 33
TRAJECTORY_STEPS = 30
NOISE_DRAWS = 3
SEEDS = (0, 1)
SCALE_BATCHES = 8
SCALE_STEPS = 20
SCALE_TRIALS = 5


@dataclass
class _Known:
    """What was recorded of float32 at one batch."""

    reference: Trajectory
    noise: tuple[NoisePoint, ...] | None = None
    runs: dict[int, Trajectory] = field(default_factory=dict)
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
        seconds: float = 60.0,
        on_event: OnEvent = silent,
    ) -> None:
        self._tracer, self._on_event = tracer, on_event
        self._tolerance = tolerance or Tolerance()
        self._seconds = seconds
        self._known: dict[tuple[int, int], _Known] = {}

    def forget(self) -> None:
        """Record float32 anew: the tracer's worker was replaced."""
        self._known.clear()

    def prove(self, recipe: Recipe, *, seeds: Sequence[int] = SEEDS) -> Verdict:
        """Judge `recipe` against float32 at its own micro-batch."""
        started = time.monotonic()
        deadline = started + self._seconds
        missing: list[str] = []
        known = self._reference(recipe, missing)
        points = self._tracer.shadow(recipe=recipe)
        if not _finite(points):
            seconds = time.monotonic() - started
            evidence = Evidence(shadow=points, seconds=seconds, not_covered=("trajectories",))
            return judge(evidence, self._tolerance)
        if known.noise is None:
            known.noise = self._tracer.noise(draws=NOISE_DRAWS)
        runs = [
            run
            for index, seed in enumerate(seeds)
            if (run := self._run(recipe, known, seed, deadline, len(seeds) - index, missing))
        ]
        evidence = Evidence(
            shadow=points,
            noise=known.noise,
            runs=tuple(runs),
            seconds=time.monotonic() - started,
            not_covered=tuple(missing),
            notes=_notes(known.reference),
        )
        return judge(evidence, self._tolerance)

    def _reference(self, recipe: Recipe, missing: list[str]) -> _Known:
        """The float32 run with its checkpoints; the tracer keeps those of the last call only."""
        key = (recipe.batch_size, recipe.accumulation_steps)
        known = self._known.get(key)
        if known is None:
            self._known.clear()
            reference = self._tracer.reference(
                batch_size=recipe.batch_size,
                accumulation_steps=recipe.accumulation_steps,
                steps=REFERENCE_STEPS,
                checkpoints=CHECKPOINTS,
                seconds=self._seconds * 0.35,
            )
            known = self._known[key] = _Known(reference)
        steps = len(known.reference.losses)
        late = [str(step) for step in CHECKPOINTS if step >= steps]
        if late:
            missing.append(f"shadow at steps {', '.join(late)} (out of time)")
        return known

    def _run(
        self,
        recipe: Recipe,
        known: _Known,
        seed: int,
        deadline: float,
        left: int,
        missing: list[str],
    ) -> SeedRun | None:
        """One seed's runs, as long as the time that is left allows."""
        reference = known.reference
        step = reference.seconds / max(1, len(reference.losses))
        share = (deadline - time.monotonic()) / left
        runs = 1 + (seed not in known.noisy) + (seed != 0 and seed not in known.runs)
        steps = min(TRAJECTORY_STEPS, len(reference.losses) if seed == 0 else TRAJECTORY_STEPS)
        if step > 0:
            steps = min(steps, int(share / (1.2 * runs * step)))
        if steps < MIN_STEPS:
            missing.append(f"trajectory of seed {seed} (out of time)")
            return None
        if steps < TRAJECTORY_STEPS:
            missing.append(f"steps {steps} to {TRAJECTORY_STEPS} of seed {seed} (out of time)")
        plain = self._plain(known, recipe, seed, steps)
        noisy = self._noisy(known, recipe, seed, steps)
        candidate = self._tracer.trajectory(recipe=recipe, seed=seed, steps=steps)
        return SeedRun(plain, candidate, noisy)

    def _plain(self, known: _Known, recipe: Recipe, seed: int, steps: int) -> Trajectory:
        """The float32 run of a seed, cut to `steps`; `evaluate` only compares equal lengths."""
        float32 = _float32(recipe)
        kept = known.runs.get(seed)
        if kept is None or len(kept.losses) < steps:
            if seed == 0 and known.reference.metric is None:
                kept = known.reference
            else:
                kept = self._tracer.trajectory(recipe=float32, seed=seed, steps=steps)
            known.runs[seed] = kept
        return replace(kept, losses=kept.losses[:steps])

    def _noisy(self, known: _Known, recipe: Recipe, seed: int, steps: int) -> Trajectory:
        kept = known.noisy.get(seed)
        if kept is None or len(kept.losses) < steps:
            kept = self._tracer.trajectory(
                recipe=_float32(recipe), seed=seed, steps=steps, noisy=True
            )
            known.noisy[seed] = kept
        return replace(kept, losses=kept.losses[:steps])

    def tune_loss_scale(self, recipe: Recipe) -> tuple[LossScale, ScaleEvidence]:
        """Choose a float16 recipe's initial loss scale, and confirm it by short trainings.

        Optuna holds the trials over the exponent; the analytic start is enqueued first, and where
        it neither skips a step nor loses any gradient, one trial is enough.
        """
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        histogram = self._tracer.backward_exponents(recipe=recipe, batches=SCALE_BATCHES)
        start = initial_exponent(histogram)
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
        scores: dict[int, float] = {}
        skips: dict[int, int] = {}
        while len(scores) < SCALE_TRIALS:
            proposed = candidates(start, scores)
            if not proposed:
                break
            study.enqueue_trial({"exponent": proposed[0]})
            trial = study.ask()
            exponent = trial.suggest_int("exponent", -24, 126)
            run = self._tracer.trajectory(
                recipe=replace(recipe, loss_scale=LossScale(initial=2.0**exponent)),
                seed=0,
                steps=SCALE_STEPS,
            )
            lost = underflow(histogram, exponent)
            scores[exponent] = objective(len(run.skipped), len(run.losses), lost)
            skips[exponent] = len(run.skipped)
            study.tell(trial, scores[exponent])
            if skips[exponent] == 0 and lost < 1e-3:
                break
        best = min(scores, key=lambda e: (scores[e], abs(e - start)))
        evidence = ScaleEvidence(
            exponent=best,
            largest_safe=largest_safe_exponent(histogram),
            largest_gradient=histogram.largest,
            smallest_gradient=histogram.smallest,
            underflow=underflow(histogram, best),
            skipped_steps=skips[best],
            steps=SCALE_STEPS,
            trials=len(scores),
            batches=histogram.batches,
            note="" if histogram.finite else "the backward pass itself gives inf or NaN",
        )
        return loss_scale(evidence), evidence

    def find_islands(self, recipe: Recipe, units: Sequence[Unit]) -> Islands:
        """Look for the few modules that must stay in float32, and prove the mended recipe."""
        history: list[Tried] = []
        while True:
            step = next_islands(units, history)
            if isinstance(step, Impossible):
                return Islands(None, None, step.reason, len(history), _tried(history))
            if isinstance(step, Found):
                break
            self._on_event("islands", len(history))
            verdict = self.prove(replace(recipe, float32_modules=step), seeds=SEEDS[:1])
            history.append(Tried(step, verdict.accepted))
        mended = replace(recipe, float32_modules=step.paths)
        verdict = self.prove(mended)
        share = sum(unit.products for unit in units if unit.path in step.paths)
        names = ", ".join(path or "the model's own forward" for path in step.paths)
        if not verdict.accepted:
            reason = f"with {names} in float32 {verdict.reason}"
            return Islands(None, verdict, reason, len(history), _tried(history))
        reason = f"trains like float32 with {names} (or a neighbour of it) kept in float32"
        return Islands(mended, verdict, reason, len(history), _tried(history), share)


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


def _tried(history: Sequence[Tried]) -> tuple[str, ...]:
    """Every unit that was tried as an island."""
    return tuple(dict.fromkeys(path for tried in history for path in tried.paths))


def _float32(recipe: Recipe) -> Recipe:
    return Recipe(batch_size=recipe.batch_size, accumulation_steps=recipe.accumulation_steps)


def _finite(points: Sequence[ShadowPoint]) -> bool:
    return all(point.loss is not None for point in points)


def _notes(reference: Trajectory) -> tuple[str, ...]:
    if reference.reproducible:
        return ()
    return ("build_data gives other data each time: the first ones were kept and replayed",)
