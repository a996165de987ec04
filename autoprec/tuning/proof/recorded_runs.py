"""The training runs of a proof: float32 and one candidate, recorded through a tracer and kept.

`RunRecorder` keeps what is the same for every recipe at one batch (the float32 runs and what noise
does to them), so that a second recipe costs less. It decides nothing: `recipe_proof` does.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from autoprec.backends.protocol import Tracer
from autoprec.core.numerics import proof_steps
from autoprec.core.numerics.judging import AT_THE_SAME_WEIGHTS
from autoprec.core.numerics.loss_curves import SeedRun
from autoprec.core.numerics.noise_scale import NoiseScale, noise_scale
from autoprec.core.numerics.traces import NoisyStep, StepComparison, Trajectory
from autoprec.core.numerics.verdict import ProofEvidence
from autoprec.core.recipe import Recipe
from autoprec.core.recipe_words import describe_batch_of
from autoprec.errors import TaskError

SEEDS = (0, 1)

#: Perturbed float32 computations per checkpoint.
NOISE_DRAWS = 3

#: Steps at which a candidate whose magnitudes grow is compared with float32 once more.
LATE_CHECK_STEPS = (34, 39, 44, 49, 54, 59)


class ProofTimeout(Exception):
    """A proof ran out of time, or the machine stalls: the rest is not covered."""

    def __init__(self, what: str, steps: int) -> None:
        super().__init__(f"{what} (no time was left at step {steps})")


@dataclass
class RecordedRuns:
    """The runs recorded for one batch: float32's, plain and perturbed, and one candidate's.

    They train on batches of `batch_size` samples. Runs are kept by seed, the longest of each;
    `comparisons` and `noise` are at the checkpoints of `reference`.
    """

    reference: Trajectory
    batch_size: int
    noise: tuple[NoisyStep, ...] | None = None
    plain: dict[int, Trajectory] = field(default_factory=dict)
    noisy: dict[int, Trajectory] = field(default_factory=dict)
    comparisons: tuple[StepComparison, ...] = ()
    candidate: Recipe | None = None
    candidate_runs: dict[int, Trajectory] = field(default_factory=dict)

    def stopping_step(self, max_steps: int) -> int:
        """Return the step at which float32's loss no longer falls.

        The reference may be longer, for an earlier candidate: that must not change a verdict.
        """
        return proof_steps.stopping_step(self.reference.losses, max_steps)

    def compared(self, evidence: ProofEvidence, steps: int) -> ProofEvidence:
        """Return the evidence with the comparisons at the checkpoints below `steps`.

        What noise does there is not in it.
        """
        reached = [each for each in self.comparisons if each.step < steps]
        comparisons = [each for each in reached if not each.batch]
        missing = _missing_checkpoints(comparisons, steps)
        if comparisons and not any(each.gradient_seen for each in comparisons):
            missing.append("gradients (the training step shows none)")
        short = proof_steps.SHORT_STEPS
        return replace(
            evidence,
            comparisons=tuple(each for each in comparisons if each.step < short),
            late_comparisons=tuple(each for each in comparisons if each.step >= short),
            other_batches=tuple(each for each in reached if each.batch),
            noise=(),
            late_noise=(),
            other_noise=(),
            float32_losses=self.reference.losses[:steps],
            not_covered=tuple(missing),
            notes=_notes(self.reference),
        )


class RunRecorder:
    """Trains float32 and candidates through a tracer; keeps the runs of the last batch.

    `deadline` is the clock reading (`time.monotonic`) at which a run is cut off.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._batch: tuple[int, int, int] | None = None
        self._runs: RecordedRuns | None = None
        self._noise_shares: dict[int, tuple[int, dict[int, float | None]]] = {}
        self.deadline = math.inf

    def forget(self) -> None:
        """Forget all runs: the tracer lost its checkpoints."""
        self._batch = self._runs = None

    def reference(self, recipe: Recipe, length: proof_steps.ProofLength) -> RecordedRuns:
        """Return the float32 run for the recipe's batch, with its checkpoints in the tracer.

        The tracer keeps the checkpoints of the last call only.
        """
        batch = (recipe.batch_size, recipe.accumulation_steps, length.batch_size)
        if self._runs is None or self._batch != batch:
            self.forget()
            steps = min(proof_steps.FIRST_STEPS, length.steps)
            reference = self._record(recipe, length.batch_size, steps)
            _check_finite(reference, replace(recipe, batch_size=length.batch_size))
            return self._keep(recipe, reference, length.batch_size)
        return self._runs

    def pace(self, recipe: Recipe, seconds: float) -> Trajectory:
        """Train float32's first steps for so many seconds, to see what one takes.

        Where they end in time, they are the reference of a proof that trains at the recipe's batch.
        """
        self.forget()
        steps, batch = proof_steps.FIRST_STEPS, recipe.batch_size
        run = self._trained(recipe, batch, steps, seconds, stop_at_plateau=True)
        if run.finite and proof_steps.has_ended(run.losses, steps):
            self._keep(recipe, run, batch)
        return run

    def _keep(self, recipe: Recipe, reference: Trajectory, batch_size: int) -> RecordedRuns:
        self._batch = (recipe.batch_size, recipe.accumulation_steps, batch_size)
        self._runs = RecordedRuns(reference, batch_size, plain={SEEDS[0]: reference})
        return self._runs

    def compare(self, recipe: Recipe, runs: RecordedRuns) -> None:
        """Compare the recipe with float32 at every checkpoint."""
        runs.comparisons = self._tracer.compare_steps(recipe=recipe)
        batch = gradient_batch(recipe, runs.batch_size)
        shares = {each.step: each.noise_share for each in runs.comparisons if not each.batch}
        _, known = self._noise_shares.get(recipe.batch_size, (batch, {}))
        self._noise_shares[recipe.batch_size] = (batch, known | shares)

    def with_noise(self, evidence: ProofEvidence, runs: RecordedRuns) -> ProofEvidence:
        """Return the evidence with what noise does at its checkpoints, measured once."""
        if evidence.noise:
            return evidence
        if runs.noise is None:
            runs.noise = self._tracer.noise(draws=NOISE_DRAWS)
        early, late = (
            {point.step for point in points}
            for points in (evidence.comparisons, evidence.late_comparisons)
        )
        own = [each for each in runs.noise if not each.batch]
        return replace(
            evidence,
            noise=tuple(each for each in own if each.step in early),
            late_noise=tuple(each for each in own if each.step in late),
            other_noise=tuple(each for each in runs.noise if each.batch),
        )

    def noise_scale(self, recipe: Recipe) -> NoiseScale | None:
        """Return the gradient noise scale that float32 showed at the recipe's batch, if it did."""
        batch, shares = self._noise_shares.get(recipe.batch_size, (1, {}))
        return noise_scale(sorted(shares.items()), batch)

    def extend(
        self, recipe: Recipe, runs: RecordedRuns, max_steps: int, *, stop_at_plateau: bool
    ) -> None:
        """Train float32 to `max_steps`, or while its loss falls, and compare there as well.

        Where float32 itself stops being finite, the comparisons before that are all there are.
        """
        reference = self._record(
            recipe, runs.batch_size, max_steps, stop_at_plateau=stop_at_plateau
        )
        if not reference.finite:
            self.forget()
            return
        runs.reference = runs.plain[SEEDS[0]] = reference
        runs.noise = None
        self.compare(recipe, runs)

    def _record(
        self, recipe: Recipe, batch_size: int, steps: int, *, stop_at_plateau: bool = True
    ) -> Trajectory:
        """Train float32 for `steps`, or while its loss falls; keep weights at the checkpoints."""
        left = self._seconds_left()
        reference = self._trained(recipe, batch_size, steps, left, stop_at_plateau=stop_at_plateau)
        if not (stop_at_plateau and proof_steps.has_ended(reference.losses, steps)):
            _require_complete(reference, steps, "everything")
        return reference

    def _trained(
        self,
        recipe: Recipe,
        batch_size: int,
        steps: int,
        seconds: float | None,
        *,
        stop_at_plateau: bool,
    ) -> Trajectory:
        return self._tracer.reference(
            batch_size=batch_size,
            compared_batch=recipe.batch_size,
            accumulation_steps=recipe.accumulation_steps,
            steps=steps,
            checkpoints=proof_steps.checkpoint_steps(steps),
            seconds=seconds,
            stop_at_plateau=stop_at_plateau,
        )

    def compare_late(self, recipe: Recipe, runs: RecordedRuns) -> tuple[StepComparison, ...]:
        """Compare at later steps: magnitudes that grow may stop growing before they overflow."""
        self.forget()
        steps = LATE_CHECK_STEPS[-1] + 1
        run = self._tracer.reference(
            batch_size=runs.batch_size,
            compared_batch=recipe.batch_size,
            accumulation_steps=recipe.accumulation_steps,
            steps=steps,
            checkpoints=LATE_CHECK_STEPS,
            seconds=self._seconds_left(),
        )
        _require_complete(run, steps)
        return (
            self._tracer.compare_steps(recipe=recipe)
            if len(run.losses) > LATE_CHECK_STEPS[0]
            else ()
        )

    def seed_run(
        self, recipe: Recipe, runs: RecordedRuns, seed: int, steps: int, longest: int
    ) -> SeedRun:
        """Return one seed's first `steps`; the candidate trains for its `longest` run at once."""
        run = self.candidate_run(recipe, runs, seed, max(steps, longest))
        return self._paired(recipe, runs, run, seed, steps)

    def long_run(self, recipe: Recipe, runs: RecordedRuns, seed: int, steps: int) -> SeedRun:
        """Return one seed's run of `steps`."""
        run = self.candidate_run(recipe, runs, seed, steps)
        return self._paired(recipe, runs, run, seed, steps)

    def with_noisy_run(self, recipe: Recipe, runs: RecordedRuns, pair: SeedRun) -> SeedRun:
        """Return one seed's runs with a perturbed float32 run of the same length."""
        seed, steps = pair.candidate.seed, len(pair.reference.losses)
        trained = replace(recipe, batch_size=runs.batch_size)
        noisy = self._float32(runs.noisy, trained, seed, steps, noisy=True)
        return replace(pair, noisy=_truncated(noisy, steps))

    def float32_run(self, recipe: Recipe, runs: RecordedRuns, seed: int, steps: int) -> Trajectory:
        """Return the first `steps` of one seed's float32 run."""
        trained = replace(recipe, batch_size=runs.batch_size)
        return _truncated(self._float32(runs.plain, trained, seed, steps, noisy=False), steps)

    def _paired(
        self, recipe: Recipe, runs: RecordedRuns, run: Trajectory, seed: int, steps: int
    ) -> SeedRun:
        return SeedRun(self.float32_run(recipe, runs, seed, steps), _truncated(run, steps))

    def candidate_run(
        self, recipe: Recipe, runs: RecordedRuns, seed: int, steps: int
    ) -> Trajectory:
        """Return the recipe's run of at least `steps`, the one recorded if it is long enough."""
        if runs.candidate != recipe:
            runs.candidate, runs.candidate_runs = recipe, {}
        if _is_shorter(runs.candidate_runs, seed, steps):
            trained = replace(recipe, batch_size=runs.batch_size)
            runs.candidate_runs[seed] = self._train(trained, seed, steps)
        return runs.candidate_runs[seed]

    def _float32(
        self, kept: dict[int, Trajectory], recipe: Recipe, seed: int, steps: int, *, noisy: bool
    ) -> Trajectory:
        if _is_shorter(kept, seed, steps):
            kept[seed] = self._train(recipe.in_float32(), seed, steps, noisy=noisy)
        return kept[seed]

    def _train(self, recipe: Recipe, seed: int, steps: int, *, noisy: bool = False) -> Trajectory:
        run = self._tracer.trajectory(
            recipe=recipe, seed=seed, steps=steps, noisy=noisy, seconds=self._seconds_left()
        )
        _require_complete(run, steps)
        return run

    def _seconds_left(self) -> float | None:
        """Return the seconds until the deadline; None where there is none."""
        if math.isinf(self.deadline):
            return None
        return max(0.0, self.deadline - time.monotonic())


def gradient_batch(recipe: Recipe, micro_batch: int) -> int:
    """Return the samples of one backward pass: a micro-batch of every rank."""
    ranks = recipe.distributed
    return micro_batch * (1 if ranks is None else ranks.world_size)


def _is_shorter(kept: Mapping[int, Trajectory], seed: int, steps: int) -> bool:
    """Say whether the kept run of the seed can be longer, up to `steps`, or there is none."""
    return seed not in kept or _can_go_on(kept[seed], steps)


def _truncated(run: Trajectory, steps: int) -> Trajectory:
    """Return the first steps of a run, without its metric, which belongs to its end."""
    if len(run.losses) <= steps:
        return run
    return replace(run, losses=run.losses[:steps], metric=None)


def _can_go_on(run: Trajectory, steps: int) -> bool:
    return run.finite and len(run.losses) < steps


def _require_complete(run: Trajectory, steps: int, what: str = "") -> None:
    """Raise `ProofTimeout` where a run was cut off: such a run is not judged at all."""
    if _can_go_on(run, steps):
        raise ProofTimeout(what or f"a training of {steps} steps", len(run.losses))


def _check_finite(reference: Trajectory, recipe: Recipe) -> None:
    """Raise `TaskError` where float32's own loss does not stay finite."""
    if reference.finite:
        return
    step = reference.losses.index(None)
    raise TaskError(
        f"in float32 the loss is inf or NaN at step {step} (counted from 0) at "
        f"{describe_batch_of(recipe)}, so "
        "nothing can be compared with it. "
        "Look for inf or NaN in that batch of build_data, or lower the learning rate"
    )


def _missing_checkpoints(comparisons: Sequence[StepComparison], steps: int) -> list[str]:
    """Say which checkpoints the tracer had no memory for."""
    kept = {each.step for each in comparisons}
    missing = [str(step) for step in proof_steps.checkpoint_steps(steps) if step not in kept]
    if not missing:
        return []
    return [f"{AT_THE_SAME_WEIGHTS} at steps {', '.join(missing)} (no memory to keep the weights)"]


def _notes(reference: Trajectory) -> tuple[str, ...]:
    if reference.reproducible:
        return ()
    return ("build_data gives other data each time: the first ones were kept and replayed",)
