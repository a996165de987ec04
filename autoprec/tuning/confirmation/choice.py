"""The confirmation: the winner or one of its rivals is chosen, then measured against the baseline.

The choice and the ratio that the profile reports come from different rounds: reporting the rounds
that a recipe was selected by would overstate its speed. The choice is that of the race, unless
another recipe was proven than the one that won it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from autoprec.core.numerics.reference_recipe import (
    is_exact,
    is_reference,
    settings_in_float32,
)
from autoprec.core.numerics.verdict import Verdict
from autoprec.core.profile import NOT_COMPARED
from autoprec.core.ratio import Ratio
from autoprec.core.recipe import Recipe
from autoprec.core.recipe_words import describe_recipe
from autoprec.core.speed.assumptions import SPEED
from autoprec.core.speed.attribution import (
    attribute_speedup,
    baseline_at_batch_of,
)
from autoprec.core.speed.consistency import is_too_wide, overstated
from autoprec.core.speed.noise import paired_ratio
from autoprec.core.speed.race import known_finalist
from autoprec.core.speed.rounds import most_rounds, rounds_are_enough
from autoprec.core.speed.selection import Choice, Finalist, choose
from autoprec.tuning.confirmation.search_comparison import (
    far_slower_rival,
    inconsistencies,
    is_far_slower,
    lost_without_reason,
    searched_ratio,
    untried_policies,
    why_baseline,
)
from autoprec.tuning.events import Stage
from autoprec.tuning.job import TuningJob
from autoprec.tuning.race.ablations import Ablations
from autoprec.tuning.race.interleaved_timing import (
    SelectRemaining,
    TimedRounds,
    keep_all,
    time_interleaved,
)
from autoprec.tuning.race.run_race import time_race
from autoprec.tuning.race.sessions import FinalistFailed, raise_baseline_failed
from autoprec.tuning.stage_results import (
    REFERENCE,
    ConfirmationResult,
    FinalistLost,
    ProofResult,
    ProvenRecipe,
    SearchResult,
)
from autoprec.tuning.time_limit import CONFIRMATION_SHARE
from autoprec.tuning.trials import Measured, typical_measurement
from autoprec.workers.runner import Runner, raise_unrelated


def confirm(
    job: TuningJob,
    search: SearchResult,
    proof: ProofResult,
    runner: Runner,
    lost: FinalistLost | None = None,
) -> ConfirmationResult | FinalistLost:
    """Choose the recipe, and measure its speed over the baseline.

    Recipes that may share a worker use `runner`. `lost` is the finalist at whose failure an earlier
    confirmation ended. Raises where the baseline fails.
    """
    measured = search.measured if lost is None else lost.measured
    confirmation = _Confirmation(job, search, runner, Ablations(job, search))
    finalists = sorted(proof.proven, key=lambda each: -each.rate)
    return confirmation.run(finalists, measured)


@dataclass(frozen=True)
class _Confirmation:
    """The rounds of one confirmation. What was measured is passed from one step to the next."""

    job: TuningJob
    search: SearchResult
    runner: Runner
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
        """Choose among the fastest proven recipe and its rivals, and measure the choice."""
        others = [each for each in proven if each.recipe.key() != self._baseline.key()]
        return self._confirm(others[0], measured) if others else self._check_lead(measured)

    def _lose(
        self, failed: FinalistFailed, winner: ProvenRecipe, measured: Measured
    ) -> FinalistLost:
        """Give up a winner; raise where the data, the device or the baseline failed."""
        raise_unrelated(failed.failure)
        if failed.recipe.key() == self._baseline.key():
            raise_baseline_failed(failed)
        reason = f"ran before but failed in the confirmation: {failed}"
        return FinalistLost(winner.recipe, reason, measured)

    def _keep_baseline(
        self, reason: str, measured: Measured, inconclusive: str = ""
    ) -> ConfirmationResult:
        choice = Choice(self._baseline, NOT_COMPARED, reason)
        return ConfirmationResult(choice, inconclusive=inconclusive, measured=measured)

    def _in_time(self, recipes: Sequence[Recipe], *, new_processes: bool = True) -> list[Recipe]:
        """Return as many of these as can still be timed; none where that is too late for two."""
        return self.ablations.in_time(recipes, CONFIRMATION_SHARE, new_processes=new_processes)

    def _check_lead(self, measured: Measured) -> ConfirmationResult:
        """Keep the baseline; time it again where it leads by an order of magnitude.

        The best other recipe runs next to it, unless that takes long: one of the two trials may
        have been disturbed throughout.
        """
        trials, baseline = self.search.trials, self._baseline
        reason = why_baseline(trials, baseline)
        raced = self.search.finalists
        doubts = untried_policies(self.search)
        if raced:
            doubts = inconsistencies(trials, raced[0], None) or lost_without_reason(trials, raced)
        if doubts:
            return self._keep_baseline(reason, measured, doubts)
        rival = far_slower_rival(trials, baseline)
        if rival is None or not self._in_time([baseline, rival], new_processes=False):
            return self._keep_baseline(reason, measured)
        self.job.listener(Stage("confirmation", "the baseline again: it is far ahead of all else"))
        needed = self.ablations.seconds(rival, new_processes=False)
        recipes = [baseline, rival] if needed <= SPEED.comparison_seconds else [baseline]
        try:
            timed = self._time(recipes, SPEED.min_rounds, new_processes=False)
        except FinalistFailed as failed:
            if failed.recipe.key() == baseline.key():
                raise
            timed = self._time([baseline], SPEED.min_rounds, new_processes=False)
        best = timed.finalists[1] if len(timed.finalists) > 1 else None
        doubts = inconsistencies(trials, timed.finalists[0], best)
        return self._keep_baseline(reason, {**measured, **timed.measured}, doubts)

    def _confirm(
        self, winner: ProvenRecipe, measured: Measured
    ) -> ConfirmationResult | FinalistLost:
        """Choose the winner or one of its rivals, then measure the choice against the baseline.

        Simpler recipes may be chosen for it, and rivals that are float32, which need no proof.
        """
        searched = searched_ratio(self.search.trials, winner.recipe, self._baseline)
        if searched is not None and self._must_take and searched.ratio < SPEED.surely_slower_share:
            return self._take_as_searched(winner, searched, measured)
        try:
            raced = self._race(winner)
        except FinalistFailed as failed:
            return self._lose(failed, winner, measured)
        leader = None
        if raced is not None and self._is_enough(raced.finalists):
            measured = {**measured, **raced.measured}
            leader = self._choose(raced.finalists[0], raced.finalists[1:], baseline_allowed=False)
            if self.job.float32_allowed and _is_no_gain(leader.ratio):
                return self._decide(raced.finalists, measured)
        chosen = winner.recipe if leader is None else leader.recipe
        try:
            timed = self._time_against_baseline(chosen)
        except FinalistFailed as failed:
            return self._lose(failed, winner, measured)
        if timed is not None and self._is_enough(timed.finalists):
            measured = {**measured, **timed.measured}
            before = None if leader is None else leader.ratio
            decided = self._decide(timed.finalists[:2], measured, before)
        elif raced is not None and leader is not None:
            timed, decided = raced, self._decide(raced.finalists, measured)  # no time is left
        else:
            return self._leave_unconfirmed(winner, searched, measured)
        if decided.choice.recipe.key() == self._baseline.key():
            return decided
        return self._attributed(decided, winner, timed.finalists)

    def _race(self, winner: ProvenRecipe) -> TimedRounds | None:
        """Return rounds of the baseline, the winner and its rivals; None where there are none.

        They are the race's, as many as the winner ran, if all or what stands for them ran in it.
        """
        rivals = [
            recipe
            for recipe in self.ablations.rivals(winner.recipe)
            if self._may_be_chosen(recipe, winner)
        ]
        recipes = [self._baseline, winner.recipe, *rivals]
        found = [known_finalist(recipe, winner.recipe, self.search.finalists) for recipe in recipes]
        finalists = [each for each in found if each is not None]
        if len(finalists) == len(recipes):
            ran = len(finalists[1].rates)
            kept = [replace(f, rates=f.rates[:ran]) for f in finalists if len(f.rates) >= ran]
            return TimedRounds(tuple(kept), {})
        if not rivals or self._in_time(recipes, new_processes=False) != recipes:
            return None
        self.job.listener(Stage("confirmation", "the winner and simpler recipes"))
        try:
            timed = time_race(
                self.job, recipes, self.search.trials, self.runner, CONFIRMATION_SHARE
            )
        except FinalistFailed as failed:
            if failed.recipe not in rivals:
                raise
            return None
        ran = len(timed.finalists[0].rates)
        to_the_end = tuple(each for each in timed.finalists if len(each.rates) == ran)
        return replace(timed, finalists=to_the_end)

    def _is_enough(self, finalists: Sequence[Finalist]) -> bool:
        return len(finalists[0].rates) >= min(SPEED.min_rounds, self.job.options.rounds)

    def _may_be_chosen(self, recipe: Recipe, winner: ProvenRecipe) -> bool:
        """Say whether a rival may be chosen: it may be as fast, and needs no proof of its own."""
        raced = known_finalist(recipe, winner.recipe, self.search.finalists)
        if raced is None and is_far_slower(self.search.trials, recipe, winner.recipe):
            return False
        if recipe.policy is winner.recipe.policy:
            return True
        verdict = _exact_verdict(recipe, winner)
        return self.job.float32_allowed and verdict is not None and verdict.accepted

    def _decide(
        self, finalists: Sequence[Finalist], measured: Measured, raced: Ratio | None = None
    ) -> ConfirmationResult:
        """Choose the fastest; keep the baseline where the rounds cannot be believed.

        The baseline is the first finalist; `raced` is what the choice gained in earlier rounds.
        """
        allowed = self.job.float32_allowed
        baseline, *rivals = finalists
        leader = self._choose(baseline, rivals, baseline_allowed=False)
        best = next(each for each in rivals if each.recipe.key() == leader.recipe.key())
        doubts = inconsistencies(self.search.trials, baseline, best)
        if raced is not None and not self.search.trials.rehearsed:
            doubts = "; ".join(filter(None, (doubts, overstated(raced, leader.ratio))))
        if doubts and allowed:
            return self._keep_baseline("", measured, doubts)
        choice = self._choose(baseline, rivals, baseline_allowed=allowed)
        return ConfirmationResult(choice, inconclusive=doubts, measured=measured)

    def _choose(
        self, baseline: Finalist, rivals: Sequence[Finalist], *, baseline_allowed: bool
    ) -> Choice:
        share = self.search.trials.space.batch_share
        return choose(baseline, rivals, baseline_allowed=baseline_allowed, share=share)

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
            present=self.ablations.gain_over_present(recipe, rates),
            proven=proven,
            over_baseline=paired_ratio(own, base),
            at_same_batch=paired_ratio(own, rates[same]) if compared else None,
            waterfall=attribute_speedup(
                recipe, self._baseline, rates, self.search.trials.task.weights_in
            ),
        )

    def _take_as_searched(
        self, winner: ProvenRecipe, searched: Ratio, measured: Measured
    ) -> ConfirmationResult:
        """Take the recipe that must be taken, with its speed in the search."""
        choice = Choice(winner.recipe, searched, "nothing else was asked for")
        return ConfirmationResult(choice, proven=winner, over_baseline=searched, measured=measured)

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
        return replace(result, not_covered=(f"{name} in alternation with the baseline",))

    def _time_against_baseline(self, recipe: Recipe) -> TimedRounds | None:
        """Time the baseline, a recipe and the parts of its speedup until its ratio is known.

        A part that fails is left out, or that has no time; None where the recipe itself has none.
        """
        recipes = self._in_time([self._baseline, recipe, *self.ablations.parts(recipe)])
        if not recipes:
            return None
        self.job.listener(Stage("confirmation", "the winner against the baseline"))

        def running(finalists: tuple[Finalist, ...]) -> Collection[int]:
            ratio = paired_ratio(finalists[1].rates, finalists[0].rates)
            enough = rounds_are_enough(
                ratio, self.job.options.rounds, early=self.job.on_cpu, must_take=self._must_take
            )
            return () if enough else keep_all(finalists)

        while True:
            try:
                return self._time(recipes, most_rounds(self.job.options.rounds), running)
            except FinalistFailed as failed:
                if failed.recipe not in recipes[2:]:
                    raise
                recipes = [each for each in recipes if each != failed.recipe]

    def _time(
        self,
        recipes: Sequence[Recipe],
        rounds: int,
        running: SelectRemaining = keep_all,
        *,
        new_processes: bool = True,
    ) -> TimedRounds:
        """Time recipes in alternation, until `running` or the time limit ends it."""
        return time_interleaved(
            self.job,
            recipes,
            rounds,
            self.search.trials,
            self.runner,
            running,
            new_processes=new_processes,
        )


def _is_no_gain(ratio: Ratio) -> bool:
    """Say whether a ratio, known as roughly as it may be, is none to recommend."""
    return ratio.ratio <= 1.0 + SPEED.min_gain and not is_too_wide(ratio)


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
