"""The confirmation: proven finalists against the baseline, then the winner against float32 again.

The choice among several finalists and the ratio that the profile reports come from different
rounds: reporting the rounds that a recipe was selected by would overstate its speed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from autoprec.core.numerics.reference_recipe import (
    is_exact,
    is_reference,
    settings_in_float32,
)
from autoprec.core.numerics.verdict import Verdict
from autoprec.core.profile import NOT_COMPARED
from autoprec.core.recipe import Recipe
from autoprec.core.recipe_words import describe_recipe
from autoprec.core.speed.attribution import (
    attribute_speedup,
    baseline_at_batch_of,
    switch_off_in_turn,
)
from autoprec.core.speed.best_arm import MIN_ROUNDS
from autoprec.core.speed.consistency import is_too_wide
from autoprec.core.speed.noise import MIN_GAIN, Ratio, paired_ratio
from autoprec.core.speed.selection import Choice, Finalist, choose
from autoprec.core.speed.trial_results import MAY_BE_FASTEST_SHARE
from autoprec.errors import TaskError
from autoprec.tuning.confirmation.ablations import COMPARISON_SECONDS, Ablations
from autoprec.tuning.confirmation.interleaved_timing import (
    SelectRemaining,
    TimedRounds,
    keep_all,
    time_interleaved,
)
from autoprec.tuning.confirmation.search_comparison import (
    far_slower_rival,
    inconsistencies,
    searched_ratio,
    why_baseline,
)
from autoprec.tuning.confirmation.sessions import FinalistFailed
from autoprec.tuning.events import Stage
from autoprec.tuning.job import TuningJob
from autoprec.tuning.search.trials import Measured, typical_measurement
from autoprec.tuning.stage_results import (
    REFERENCE,
    ConfirmationResult,
    FinalistLost,
    ProofResult,
    ProvenRecipe,
    SearchResult,
)
from autoprec.tuning.time_limit import CONFIRMATION_SHARE
from autoprec.workers.runner import Runner, raise_unrelated, raise_user_error

#: The most finalists besides the baseline.
_MAX_FINALISTS = 4

#: Rounds among several finalists at least.
_MIN_FINALIST_ROUNDS = 5

#: A recipe that must be taken and ran below this share of the baseline's speed in the search is
#: slower, whatever disturbed either of them: measuring by how much is worth no further round.
_SURELY_SLOWER_SHARE = 0.5


def confirm(
    job: TuningJob,
    search: SearchResult,
    proof: ProofResult,
    runner: Runner,
    make_runner: Callable[[], Runner],
    lost: FinalistLost | None = None,
) -> ConfirmationResult | FinalistLost:
    """Choose the recipe, and measure its speed over the baseline.

    Recipes that may share a worker use `runner`; `make_runner` makes the others'. `lost` is the
    finalist at whose failure an earlier confirmation ended. Raises where the baseline fails.
    """
    measured = search.measured if lost is None else lost.measured
    confirmation = _Confirmation(job, search, runner, make_runner, Ablations(job, search))
    finalists = sorted(proof.proven, key=lambda each: -each.rate)
    return confirmation.run(finalists, measured)


@dataclass(frozen=True)
class _Confirmation:
    """The rounds of one confirmation. What was measured is passed from one step to the next."""

    job: TuningJob
    search: SearchResult
    runner: Runner
    make_runner: Callable[[], Runner]
    ablations: Ablations

    @property
    def _baseline(self) -> Recipe:
        return self.search.baseline

    @property
    def _must_take(self) -> bool:
        """Say whether a recipe is taken however slow it is, and its speed means anything."""
        return not (self.job.float32_allowed or self.search.trials.rehearsed)

    def run(
        self, proven: Sequence[ProvenRecipe], measured: Measured
    ) -> ConfirmationResult | FinalistLost:
        """Run the finalists among each other, then confirm the winner."""
        others = [each for each in proven if each.recipe.key() != self._baseline.key()]
        others = [each for each in others if each.rate >= MAY_BE_FASTEST_SHARE * others[0].rate]
        others = others[:_MAX_FINALISTS]
        try:
            if not others:
                return self._check_lead(measured)
            if len(others) > 1 and not self._is_late():
                self.job.listener(Stage("confirmation", "finalists in alternation"))
                rounds = max(_MIN_FINALIST_ROUNDS, self.job.options.rounds // 2 + 1)
                recipes = [self._baseline, *(each.recipe for each in others)]
                timed = self._time(recipes, rounds)
                measured = {**measured, **timed.measured}
                baseline, *rivals = timed.finalists
                leader = choose(baseline, rivals, baseline_allowed=False)
                if self.job.float32_allowed and leader.ratio.high < 1.0:
                    return self._decide(baseline, rivals, measured)
                others = [each for each in others if each.recipe.key() == leader.recipe.key()]
            return self._confirm(others[0], measured)
        except FinalistFailed as failed:
            return self._lose(failed, measured)

    def _lose(self, failed: FinalistFailed, measured: Measured) -> FinalistLost:
        """Give up a finalist; raise where the data, the device or the baseline failed."""
        raise_unrelated(failed.failure)
        if failed.recipe.key() == self._baseline.key():
            raise_user_error(failed.failure)
            raise TaskError(
                f"the float32 baseline ran before but failed in the confirmation: {failed}"
            ) from failed
        reason = f"ran before but failed in the confirmation: {failed}"
        return FinalistLost(failed.recipe, reason, measured)

    def _keep_baseline(
        self, reason: str, measured: Measured, inconclusive: str = ""
    ) -> ConfirmationResult:
        choice = Choice(self._baseline, NOT_COMPARED, reason)
        return ConfirmationResult(choice, inconclusive=inconclusive, measured=measured)

    def _is_late(self) -> bool:
        return self.job.deadline.passed(CONFIRMATION_SHARE)

    def _check_lead(self, measured: Measured) -> ConfirmationResult:
        """Keep the baseline; time it again where it leads by an order of magnitude.

        The best other recipe runs next to it, unless that takes long: one of the two trials may
        have been disturbed throughout.
        """
        trials, baseline = self.search.trials, self._baseline
        reason = why_baseline(trials, baseline)
        rival = far_slower_rival(trials, baseline)
        if rival is None or self._is_late():
            return self._keep_baseline(reason, measured)
        self.job.listener(Stage("confirmation", "the baseline again: it is far ahead of all else"))
        quick = self.ablations.seconds(rival) <= COMPARISON_SECONDS
        try:
            timed = self._time([baseline, rival] if quick else [baseline], MIN_ROUNDS)
        except FinalistFailed as failed:
            if failed.recipe.key() == baseline.key():
                raise
            timed = self._time([baseline], MIN_ROUNDS)
        best = timed.finalists[1] if len(timed.finalists) > 1 else None
        doubts = inconsistencies(trials, timed.finalists[0], best)
        return self._keep_baseline(reason, {**measured, **timed.measured}, doubts)

    def _confirm(self, winner: ProvenRecipe, measured: Measured) -> ConfirmationResult:
        """Measure the winner against the baseline, next to its ablations.

        Simpler recipes may be chosen for it, and ablations that are float32, which need no proof.
        """
        searched = searched_ratio(self.search.trials, winner.recipe, self._baseline)
        if searched is not None and self._must_take and searched.ratio < _SURELY_SLOWER_SHARE:
            return self._take_as_searched(winner, searched, measured)
        simpler = self.ablations.simpler(winner.recipe)
        began = time.monotonic()
        timed = None if self._is_late() else self._time_winner(winner, simpler)
        took = time.monotonic() - began
        if timed is not None:
            measured = {**measured, **timed.measured}
        if timed is None or not self._is_enough(timed):
            return self._leave_unconfirmed(winner, searched, measured)
        may_win = {recipe.key() for recipe in (winner.recipe, *simpler)}
        baseline, *others = timed.finalists
        rivals = [
            each for each in others if each.recipe.key() in may_win or self._is_proven(each, winner)
        ]
        decided = self._decide(baseline, rivals, measured)
        if decided.choice.recipe.key() == self._baseline.key():
            return decided
        left = self.job.deadline.left(CONFIRMATION_SHARE)
        if self.job.options.attribute and left > took:  # it takes as long again
            again = self._time_every_part(decided.choice.recipe)
            if self._is_enough(again):
                timed = again
                decided = replace(decided, measured={**measured, **again.measured})
        return self._attributed(decided, winner, timed.finalists)

    def _is_enough(self, timed: TimedRounds) -> bool:
        return len(timed.finalists[0].rates) >= min(MIN_ROUNDS, self.job.options.rounds)

    def _time_every_part(self, recipe: Recipe) -> TimedRounds:
        """Time the chosen recipe again, next to all that lie between it and the baseline.

        One of those that fails is left out.
        """
        self.job.listener(Stage("confirmation", "each part of the speed-up by itself"))
        steps = [step.recipe for step in switch_off_in_turn(recipe, self._baseline)]
        while True:
            try:
                return self._time([recipe, *steps], self.job.options.rounds)
            except FinalistFailed as failed:
                off = failed.recipe.key()
                if off in (recipe.key(), self._baseline.key()):
                    raise
                steps = [step for step in steps if step.key() != off]

    def _is_proven(self, finalist: Finalist, winner: ProvenRecipe) -> bool:
        """Say whether an ablation may be chosen without a proof of its own."""
        verdict = _exact_verdict(finalist.recipe, winner)
        return self.job.float32_allowed and verdict is not None and verdict.accepted

    def _time_winner(self, winner: ProvenRecipe, simpler: Sequence[Recipe]) -> TimedRounds:
        self.job.listener(Stage("confirmation", "the winner against float32"))
        compared = self.ablations.compared(winner, simpler)
        try:
            return self._time_against_baseline(winner, compared)
        except FinalistFailed as failed:
            if failed.recipe.key() not in {recipe.key() for recipe in compared}:
                raise
            return self._time_against_baseline(winner, [])  # ablations do not run at this batch

    def _decide(
        self, baseline: Finalist, rivals: Sequence[Finalist], measured: Measured
    ) -> ConfirmationResult:
        """Choose the fastest; keep the baseline where the rounds cannot be believed."""
        allowed = self.job.float32_allowed
        leader = choose(baseline, rivals, baseline_allowed=False)
        best = next(each for each in rivals if each.recipe.key() == leader.recipe.key())
        doubts = inconsistencies(self.search.trials, baseline, best)
        if doubts and allowed:
            return self._keep_baseline("", measured, doubts)
        choice = choose(baseline, rivals, baseline_allowed=allowed)
        return ConfirmationResult(choice, inconclusive=doubts, measured=measured)

    def _attributed(
        self, decided: ConfirmationResult, winner: ProvenRecipe, finalists: Sequence[Finalist]
    ) -> ConfirmationResult:
        """Add what the chosen recipe gains over the baseline, and which settings that is due to."""
        recipe = decided.choice.recipe
        rates = {each.recipe.key(): each.rates for each in finalists}
        proven = replace(winner, recipe=recipe)
        exact = _exact_verdict(recipe, winner)
        if exact is not None:
            proven = ProvenRecipe(recipe, exact, winner.rate, winner.step_seconds)
        own, base = rates[recipe.key()], rates[self._baseline.key()]
        same = baseline_at_batch_of(recipe, self._baseline).key()
        compared = same in rates and same != recipe.key()
        return replace(
            decided,
            proven=proven,
            speedup=paired_ratio(own, base),
            speedup_same_batch=paired_ratio(own, rates[same]) if compared else None,
            waterfall=attribute_speedup(
                recipe, self._baseline, rates, self.search.trials.task.weights_in
            ),
        )

    def _take_as_searched(
        self, winner: ProvenRecipe, searched: Ratio, measured: Measured
    ) -> ConfirmationResult:
        """Take the recipe that must be taken, with its speed in the search."""
        choice = Choice(winner.recipe, searched, "nothing else was asked for")
        return ConfirmationResult(choice, proven=winner, speedup=searched, measured=measured)

    def _leave_unconfirmed(
        self, winner: ProvenRecipe, searched: Ratio | None, measured: Measured
    ) -> ConfirmationResult:
        """Keep float32 where no time is left: a recipe is chosen only after running next to it."""
        name = describe_recipe(winner.recipe)
        if self.job.float32_allowed:
            result = self._keep_baseline(f"there was no time left to confirm {name}", measured)
        else:
            if searched is None:
                base = typical_measurement(self.search.trials, measured, self._baseline)
                ratio = winner.rate / base.samples_per_second
                searched = Ratio(ratio, ratio, ratio, 1)
            result = self._take_as_searched(winner, searched, measured)
        return replace(result, not_covered=(f"{name} in alternation with float32",))

    def _time_against_baseline(
        self, winner: ProvenRecipe, compared: Sequence[Recipe]
    ) -> TimedRounds:
        """Time the baseline, the winner and the compared recipes until it is decided."""
        recipes = [self._baseline, winner.recipe, *compared]

        def running(finalists: tuple[Finalist, ...]) -> Collection[int]:
            ratio = paired_ratio(finalists[1].rates, finalists[0].rates)
            decided = self._is_decided(len(finalists[0].rates), ratio)
            return () if decided else keep_all(finalists)

        return self._time(recipes, 2 * self.job.options.rounds, running)

    def _is_decided(self, ran: int, ratio: Ratio) -> bool:
        """Say whether more rounds of the winner would change nothing.

        Whether it is surely faster is tested once: testing after every round would bias the result.
        """
        rounds = self.job.options.rounds
        if self._must_take and ran >= MIN_ROUNDS and ratio.high < 1.0:
            return True
        if ran < rounds or is_too_wide(ratio):
            return False
        return ratio.ratio <= 1.0 + MIN_GAIN or (ran == rounds and ratio.low > 1.0)

    def _time(
        self, recipes: Sequence[Recipe], rounds: int, running: SelectRemaining = keep_all
    ) -> TimedRounds:
        """Time recipes in alternation, until `running` or the time limit ends it."""

        def in_time(finalists: tuple[Finalist, ...]) -> Collection[int]:
            return () if self._is_late() else running(finalists)

        return time_interleaved(
            self.job,
            recipes,
            rounds,
            self.search.trials,
            self.runner,
            in_time,
            make_runner=self.make_runner,
        )


def _exact_verdict(recipe: Recipe, winner: ProvenRecipe) -> Verdict | None:
    """Return the verdict on float32 without a training, such as an ablation of the winner.

    Plain float32 is the reference; float32 with the winner's settings was compared with it before
    the winner was proven. None for any other recipe.
    """
    if is_reference(recipe):
        return REFERENCE
    plain = settings_in_float32(recipe)
    same = plain.key() == settings_in_float32(winner.recipe).key()
    return winner.settings if is_exact(recipe) and same else None
