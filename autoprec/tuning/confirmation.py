"""The finish: proven finalists against the baseline, then the winner anew against float32."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from autoprec.core.device.policies import Refusal
from autoprec.core.recipe import KEEP_MEMORY, Recipe
from autoprec.core.speed.attribution import (
    PRECISION,
    attribute_speedup,
    baseline_at_batch_of,
    describe_recipe,
    switch_off_in_turn,
)
from autoprec.core.speed.best_arm import MIN_ROUNDS, TURN_SECONDS
from autoprec.core.speed.consistency import is_too_wide
from autoprec.core.speed.selection import MIN_GAIN, Choice, Finalist, choose
from autoprec.core.speed.trial_results import MAY_BE_FASTEST_SHARE
from autoprec.core.statistics import Ratio, paired_ratio
from autoprec.errors import TaskError
from autoprec.tuning.consistency import doubts_of, far_behind, searched_ratio, why_plain
from autoprec.tuning.events import Stage
from autoprec.tuning.interleaved_timing import (
    FinalistFailed,
    SelectRemaining,
    fit_in_memory_together,
    keep_all,
    time_interleaved,
)
from autoprec.tuning.job import TuningJob
from autoprec.tuning.profile_builder import REFERENCE, Findings, ProvenRecipe
from autoprec.tuning.proof_stage import is_reference
from autoprec.tuning.time_limit import CONFIRMATION_SHARE
from autoprec.workers.runner import Runner, raise_device_lost, raise_user_error

#: The most finalists besides the baseline.
_MAX_FINALISTS = 4
_FEWEST_ROUNDS = 5

#: What is only there to compare with may take so many seconds, or as many as winner and baseline
#: themselves; to make ready takes so many turns.
_BESIDE_SECONDS, _READY = 5.0, 3

#: What was asked for and ran below this share of the baseline's speed in the search is slower,
#: whatever disturbed either of them: by how much exactly is worth no further round.
_SURELY_SLOWER = 0.5

_AS_IT_WAS = Ratio(1.0, 1.0, 1.0, 0)


@dataclass(frozen=True)
class Confirmation:
    """The last stage of one tuning.

    `plain` is the baseline's recipe, `runner` what finalists may share, and `make_runner` makes the
    others. Where `memory_pays` does not say of the winner's batch that keeping memory is worth it,
    the winner is also measured without.
    """

    job: TuningJob
    runner: Runner
    plain: Recipe
    findings: Findings
    make_runner: Callable[[], Runner]
    memory_pays: Callable[[int], bool]

    def run(
        self, proven: Sequence[ProvenRecipe], substitute: Callable[[Recipe], ProvenRecipe | None]
    ) -> None:
        """Choose the recipe; leave the choice and its ratios in the findings.

        The choice among several finalists and the ratio that the profile reports come from
        different rounds, so that the winner's luck in the first does not flatter it in the second.
        A finalist that fails now is out, and `substitute` may name a proven recipe in its place.
        """
        left = sorted(proven, key=lambda p: -p.rate)
        while True:
            try:
                return self._run(left)
            except FinalistFailed as failed:
                self._refuse(failed)
                left = [p for p in left if p.recipe.key() != failed.recipe.key()]
                instead = substitute(failed.recipe)
                known = {p.recipe.key() for p in left}
                if instead is not None and instead.recipe.key() not in known:
                    left = sorted([*left, instead], key=lambda p: -p.rate)

    def _refuse(self, failed: FinalistFailed) -> None:
        raise_device_lost(failed.failure)
        if failed.recipe.key() == self.plain.key():
            raise_user_error(failed.failure)
            raise TaskError(
                f"the float32 baseline ran before but failed in the confirmation: {failed}"
            ) from failed
        reason = f"ran before but failed in the confirmation: {failed}"
        self.findings.refusals.append(Refusal(failed.recipe.policy.value, reason))

    def _run(self, left: Sequence[ProvenRecipe]) -> None:
        plain, findings = self.plain, self.findings
        findings.baseline = plain
        self._keep_plain(why_plain(findings, plain))
        others = [p for p in left if p.recipe.key() != plain.key()]
        near = [p for p in others if p.rate >= MAY_BE_FASTEST_SHARE * others[0].rate]
        others = near[:_MAX_FINALISTS]
        if not others:
            self._look_again()
            return
        if len(others) > 1 and not self._late():
            self.job.listener(Stage("finish", "finalists in alternation"))
            rounds = max(_FEWEST_ROUNDS, self.job.options.rounds // 2 + 1)
            finals = self._alternate([plain, *(p.recipe for p in others)], rounds)
            leader = choose(finals[0], finals[1:], baseline_allowed=False)
            if self.job.float32_allowed and leader.ratio.high < 1.0:
                self._decide(finals[0], finals[1:])
                return
            others = [p for p in others if p.recipe.key() == leader.recipe.key()]
        self._confirm(others[0])

    def _keep_plain(self, reason: str) -> None:
        self.findings.choice = Choice(self.plain, _AS_IT_WAS, reason)

    def _late(self) -> bool:
        return self.job.deadline.passed(CONFIRMATION_SHARE)

    def _look_again(self) -> None:
        """Run the baseline anew where it seems faster than all else by an order of magnitude.

        The best of the rest runs beside it, unless it takes long: one of the two may have run on
        another machine, so to say.
        """
        rest = far_behind(self.findings, self.plain)
        if rest is None or self._late():
            return
        self.job.listener(Stage("finish", "the baseline again: it is far ahead of all else"))
        quick = self._seconds(rest) <= _BESIDE_SECONDS
        try:
            finals = self._alternate([self.plain, rest] if quick else [self.plain], MIN_ROUNDS)
        except FinalistFailed as failed:
            if failed.recipe.key() == self.plain.key():
                raise
            finals = self._alternate([self.plain], MIN_ROUNDS)
        best = finals[1] if len(finals) > 1 else None
        self.findings.inconclusive = doubts_of(self.findings, finals[0], best)

    def _confirm(self, winner: ProvenRecipe) -> None:
        """Measure the winner against the baseline, and against what lies between the two.

        In those one thing after another is switched off. Beside them runs what is simpler than the
        winner by one setting and may be chosen for it: a setting is kept only where it wins by
        itself. What of them is float32 needs no proof to be chosen.
        """
        searched = searched_ratio(self.findings, winner.recipe, self.plain)
        if searched is not None and self._forced and searched.ratio < _SURELY_SLOWER:
            self._take_as_searched(winner, searched)
            return
        simpler = self._simpler(winner.recipe)
        finals = () if self._late() else self._finals(winner, simpler)
        if not finals or len(finals[0].rates) < min(MIN_ROUNDS, self.job.options.rounds):
            self._leave_unconfirmed(winner, searched)
            return
        may_win = {recipe.key() for recipe in (winner.recipe, *simpler)}
        rivals = [f for f in finals[1:] if f.recipe.key() in may_win or self._needs_no_proof(f)]
        if self._decide(finals[0], rivals):
            self._credit(winner, finals)

    @property
    def _forced(self) -> bool:
        """Whether a recipe is taken however slow it is, and its speed means anything."""
        return not (self.job.float32_allowed or self.findings.rehearsed)

    def _needs_no_proof(self, final: Finalist) -> bool:
        return self.job.float32_allowed and is_reference(final.recipe)

    def _finals(self, winner: ProvenRecipe, simpler: Sequence[Recipe]) -> tuple[Finalist, ...]:
        self.job.listener(Stage("finish", "the winner against float32"))
        beside = self._beside(winner.recipe, winner.step_seconds, simpler)
        try:
            return self._against(winner, beside)
        except FinalistFailed as failed:
            if failed.recipe.key() not in {r.key() for r in beside}:
                raise
            return self._against(winner, [])  # they do not run at this batch

    def _decide(self, baseline: Finalist, rivals: Sequence[Finalist]) -> bool:
        """Choose, where the rounds can be believed; return whether a rival won."""
        findings, allowed = self.findings, self.job.float32_allowed
        leader = choose(baseline, rivals, baseline_allowed=False)
        best = next(f for f in rivals if f.recipe.key() == leader.recipe.key())
        findings.inconclusive = doubts_of(findings, baseline, best)
        if findings.inconclusive and allowed:
            self._keep_plain("")
            return False
        findings.choice = choose(baseline, rivals, baseline_allowed=allowed)
        return findings.choice.recipe.key() != self.plain.key()

    def _credit(self, winner: ProvenRecipe, finals: Sequence[Finalist]) -> None:
        """Keep what the chosen recipe gains over the baseline, and what that is due to."""
        findings = self.findings
        assert findings.choice is not None
        recipe = findings.choice.recipe
        rates = {final.recipe.key(): final.rates for final in finals}
        proven = replace(winner, recipe=recipe)
        if is_reference(recipe):
            proven = ProvenRecipe(recipe, REFERENCE, winner.rate, winner.step_seconds)
        findings.proven = proven
        findings.speedup = paired_ratio(rates[recipe.key()], rates[self.plain.key()])
        findings.waterfall = attribute_speedup(recipe, self.plain, rates)
        same = baseline_at_batch_of(recipe, self.plain).key()
        if same in rates and same != recipe.key():
            findings.speedup_same_batch = paired_ratio(rates[recipe.key()], rates[same])

    def _take_as_searched(self, winner: ProvenRecipe, searched: Ratio) -> None:
        """Take what was asked for at the search's word."""
        self.findings.choice = Choice(winner.recipe, searched, "nothing else was asked for")
        self.findings.proven, self.findings.speedup = winner, searched

    def _leave_unconfirmed(self, winner: ProvenRecipe, searched: Ratio | None) -> None:
        """Keep float32 where there was no time: nothing is chosen that did not run beside it."""
        name = describe_recipe(winner.recipe)
        self.findings.not_covered.append(f"{name} in alternation with float32")
        if self.job.float32_allowed:
            self._keep_plain(f"there was no time left to confirm {name}")
        else:
            ratio = winner.rate / self.findings.measurement_of(self.plain).samples_per_second
            self._take_as_searched(winner, searched or Ratio(ratio, ratio, ratio, 1))

    def _beside(self, winner: Recipe, seconds: float, simpler: Sequence[Recipe]) -> list[Recipe]:
        """What runs beside baseline and winner, of so many seconds a step, as far as may be.

        Float32 at the winner's batch comes first: it says what precision brings, and runs where the
        memory does not suffice for all at once, too.
        """
        rivals = [winner, *simpler]
        between = [step for rival in rivals for step in switch_off_in_turn(rival, self.plain)]
        between.sort(key=lambda step: step.what != PRECISION)
        found = {recipe.key(): recipe for recipe in (self.plain, *rivals)}
        left = max(_BESIDE_SECONDS, self._turns(seconds) + self._seconds(self.plain))
        for recipe in (step.recipe for step in between):
            needed = self._seconds(recipe)
            fits = recipe == between[0].recipe or fit_in_memory_together(
                self.job, [*found.values(), recipe], self.findings
            )
            if recipe.key() not in found and needed <= left and fits:
                found[recipe.key()] = recipe
                left -= needed
        return [r for r in found.values() if r not in (self.plain, winner)]

    def _seconds(self, recipe: Recipe) -> float:
        """What a recipe takes beside the others in all."""
        return self._turns(self._step_seconds(recipe))

    def _turns(self, step_seconds: float) -> float:
        return (self.job.options.rounds + _READY) * max(TURN_SECONDS, step_seconds)

    def _step_seconds(self, float32: Recipe) -> float:
        """What a step in float32 takes: as measured, else by the baseline's, as it is larger."""
        measured, plain = map(self.findings.trial_of, (float32, self.plain))
        if measured is not None:
            return measured.step_seconds
        larger = float32.effective_batch / self.plain.effective_batch
        return 0.0 if plain is None else larger * plain.step_seconds

    def _simpler(self, recipe: Recipe) -> list[Recipe]:
        """The recipe without each of its knobs, and without all.

        Kept memory is left out where it is known to pay. What was proven of the recipe holds for
        these: no knob makes anything more exact. Policies, layouts, compilation and padding the
        search has compared one by one already.
        """
        known = recipe.keeps_memory and self.memory_pays(recipe.batch_size)
        knobs = [name for name in recipe.knobs if name != KEEP_MEMORY]
        off = [{name} for name in knobs] + [{KEEP_MEMORY}] * (recipe.keeps_memory and not known)
        off += [set(knobs)] * (len(knobs) > 1)
        without = [
            replace(recipe, knobs={k: v for k, v in recipe.knobs.items() if k not in names})
            for names in off
        ]
        return [simpler for simpler in without if simpler.key() != self.plain.key()]

    def _against(self, winner: ProvenRecipe, beside: Sequence[Recipe]) -> tuple[Finalist, ...]:
        """The baseline, the winner and those beside it in alternation."""
        recipes = [self.plain, winner.recipe, *beside]

        def running(finals: tuple[Finalist, ...]) -> Collection[int]:
            ratio = paired_ratio(finals[1].rates, finals[0].rates)
            over = self._settled(len(finals[0].rates), ratio)
            return () if over else keep_all(finals)

        return self._alternate(recipes, 2 * self.job.options.rounds, running)

    def _settled(self, ran: int, ratio: Ratio) -> bool:
        """Whether more rounds of the winner would say nothing new.

        Whether it is surely faster is asked once: who asks until it is so is misled.
        """
        rounds = self.job.options.rounds
        if self._forced and ran >= MIN_ROUNDS and ratio.high < 1.0:
            return True
        if ran < rounds or is_too_wide(ratio):
            return False
        return ratio.ratio <= 1.0 + MIN_GAIN or (ran == rounds and ratio.low > 1.0)

    def _alternate(
        self,
        recipes: Sequence[Recipe],
        rounds: int,
        running: SelectRemaining = keep_all,
    ) -> tuple[Finalist, ...]:
        def in_time(finals: tuple[Finalist, ...]) -> Collection[int]:
            return () if self._late() else running(finals)

        return time_interleaved(
            self.job,
            recipes,
            rounds,
            self.findings,
            self.runner,
            in_time,
            make_runner=self.make_runner,
        )
