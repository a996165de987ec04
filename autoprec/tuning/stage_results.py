"""What each stage of a tuning hands to the next: frozen values, which no later stage changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autoprec.core.device.facts import DeviceFacts
from autoprec.core.device.policies import Refusal
from autoprec.core.measurement import Measurement, TaskFacts
from autoprec.core.numerics.island_proposals import IslandsEvidence
from autoprec.core.numerics.loss_scale_choice import ScaleEvidence
from autoprec.core.numerics.noise_scale import NoiseScale
from autoprec.core.numerics.verdict import Verdict
from autoprec.core.profile import Present
from autoprec.core.ratio import Ratio
from autoprec.core.recipe import Recipe
from autoprec.core.speed.attribution import Part
from autoprec.core.speed.selection import Choice, Finalist
from autoprec.core.speed.space import Point, Space, point_key
from autoprec.core.speed.trial_results import Outcome
from autoprec.tuning.trials import Measured, Trials, typical_measurement

REFERENCE = Verdict(verdict="equal", reason="it is the reference itself")


@dataclass(frozen=True)
class PreflightResult:
    """The task and the device as described, and the search space that follows from them.

    `alignment` is the smallest multiple that the device wants dimensions to be of.
    """

    task: TaskFacts
    facts: DeviceFacts
    space: Space
    alignment: int = 1
    refusals: tuple[Refusal, ...] = ()

    @property
    def rehearsed(self) -> bool:
        """Say whether the device is only pretended, so that times mean nothing."""
        return self.facts.observation.rehearsal


@dataclass(frozen=True)
class NeededIslands:
    """The modules that a policy cannot run without in float32, and how they were found.

    `products` is their share of the model's matrix products.
    """

    paths: tuple[str, ...]
    attempts: int
    reason: str
    products: float = 0.0


@dataclass(frozen=True)
class SearchResult:
    """The trials, and what the race of the fastest of them told.

    `baseline_point` is the baseline that fits in memory. `ranking` has the outcomes to choose from,
    as they came out in the race (empty: all of the trials), `finalists` the rates of its rounds,
    `measured` their measurements. `needed_islands` are those of policies that do not run without;
    the space of the trials has them. `noise_scale` is the gradient's, where that chose the batch.
    `notes` is what the profile should warn of, `seconds` what the search took.
    """

    trials: Trials
    baseline_point: Point
    ranking: tuple[Outcome, ...] = ()
    finalists: tuple[Finalist, ...] = ()
    measured: Measured = field(default_factory=dict)
    needed_islands: Mapping[str, NeededIslands] = field(default_factory=dict)
    refusals: tuple[Refusal, ...] = ()
    notes: tuple[str, ...] = ()
    not_covered: tuple[str, ...] = ()
    noise_scale: NoiseScale | None = None
    seconds: float = 0.0

    @property
    def ranked(self) -> tuple[Outcome, ...]:
        """Return every trial, those that raced at their speed there."""
        known = {point_key(outcome.point): outcome for outcome in self.ranking}
        return tuple(known.get(point_key(each.point), each) for each in self.trials.history)

    @property
    def baseline(self) -> Recipe:
        """Return the baseline's recipe."""
        return self.trials.space.recipe(self.baseline_point)

    @property
    def baseline_outcome(self) -> Outcome:
        """Return the baseline's outcome, as the race ranked it."""
        ranked = self.ranking or self.trials.history
        key = point_key(self.baseline_point)
        return next(outcome for outcome in ranked if point_key(outcome.point) == key)

    def of_policy(self, policy: str) -> list[Outcome]:
        """Return the outcomes of one policy, as the race ranked them."""
        ranked = self.ranking or self.trials.history
        return [outcome for outcome in ranked if outcome.point["policy"] == policy]


@dataclass(frozen=True)
class ProvenRecipe:
    """A recipe that may be chosen, with its verdict and its measured speed.

    `settings` is the verdict on float32 with the recipe's settings, where it has any, and
    `noise_scale` what the proof's float32 training showed of the gradient's noise.
    """

    recipe: Recipe
    verdict: Verdict
    rate: float
    step_seconds: float
    loss_scale: ScaleEvidence | None = None
    islands: IslandsEvidence | None = None
    settings: Verdict | None = None
    noise_scale: NoiseScale | None = None


@dataclass(frozen=True)
class ProofResult:
    """The recipes that may be chosen, and why others may not; `seconds` is what proving cost."""

    proven: tuple[ProvenRecipe, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    not_covered: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def fastest(self) -> ProvenRecipe:
        """Return the fastest proven recipe; there is one at least."""
        return max(self.proven, key=lambda each: each.rate)

    def without(self, recipe: Recipe, reason: str) -> ProofResult:
        """Return the result without a recipe that can no longer be chosen."""
        return replace(
            self,
            proven=tuple(each for each in self.proven if each.recipe.key() != recipe.key()),
            refusals=(*self.refusals, Refusal(recipe.policy.value, reason)),
        )


@dataclass(frozen=True)
class FinalistLost:
    """A confirmation that was abandoned because a finalist failed; another may take its place.

    `measured` holds the rounds that were complete before.
    """

    recipe: Recipe
    reason: str
    measured: Measured


@dataclass(frozen=True)
class ConfirmationResult:
    """The choice, and its speed over the baseline where another recipe than that was chosen.

    If the choice has another batch than the baseline, its speed `at_same_batch` as float32, too.
    `inconclusive` says why the measurements cannot be believed; `measured` holds all rounds.
    """

    choice: Choice
    proven: ProvenRecipe | None = None
    over_baseline: Ratio | None = None
    at_same_batch: Ratio | None = None
    present: Present | None = None
    waterfall: tuple[Part, ...] = ()
    inconclusive: str = ""
    not_covered: tuple[str, ...] = ()
    measured: Measured = field(default_factory=dict)


@dataclass(frozen=True)
class TuningResult:
    """What all the stages of one tuning found.

    `cpu_contention` is the largest share of the processors that other processes used meanwhile,
    `rounding` says what a rounded vocabulary was measured to bring (empty: it was not measured).
    """

    preflight: PreflightResult
    search: SearchResult
    proof: ProofResult
    confirmation: ConfirmationResult
    cpu_contention: float = 0.0
    rounding: str = ""

    @property
    def trials(self) -> Trials:
        """Return the search's trials."""
        return self.search.trials

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """Return everything that was ruled out, in the order of the stages."""
        return (*self.preflight.refusals, *self.search.refusals, *self.proof.refusals)

    @property
    def not_covered(self) -> tuple[str, ...]:
        """Return what limits left out, in the order of the stages."""
        stages = (self.search, self.proof, self.confirmation)
        return tuple(text for stage in stages for text in stage.not_covered)

    def measurement_of(self, recipe: Recipe) -> Measurement:
        """Return a recipe's typical measurement: of interleaved timing, else the search's."""
        return typical_measurement(self.trials, self.confirmation.measured, recipe)
