"""The finish: proven finalists against the baseline, then the winner anew against float32."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from autoprec.core.choice import WORTH, Choice, Finalist, choose
from autoprec.core.race import TURN_SECONDS
from autoprec.core.recipe import KEEP_MEMORY, Recipe
from autoprec.core.rules import Refusal
from autoprec.core.statistics import Ratio, paired_ratio
from autoprec.errors import TaskError
from autoprec.tuning.contest import FinalistFailed, StillRunning, contest_among, everybody
from autoprec.tuning.events import Stage
from autoprec.tuning.evidence import Findings, Proven
from autoprec.tuning.trials import Runner, raise_lost, raise_user_error
from autoprec.tuning.work import Work

#: Who is a finalist: at most this many, and nobody below this share of the fastest one's speed.
_FINALISTS, _NEAR = 4, 0.95
_FEWEST_ROUNDS = 5

#: What is only there to compare with may take so many seconds; to make ready takes so many turns.
_BESIDE_SECONDS, _READY = 5.0, 3


@dataclass(frozen=True)
class Finish:
    """The last stage of one tuning.

    `plain` is the baseline's recipe, `runner` what finalists may share, and `make_runner` makes the
    others. Where `memory_pays` does not say of the winner's batch that keeping memory is worth it,
    the winner is also measured without.
    """

    work: Work
    runner: Runner
    plain: Recipe
    findings: Findings
    make_runner: Callable[[], Runner]
    memory_pays: Callable[[int], bool]

    def run(self, proven: Sequence[Proven], substitute: Callable[[Recipe], Proven | None]) -> None:
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
        raise_lost(failed.failure)
        if failed.recipe.key() == self.plain.key():
            raise_user_error(failed.failure)
            raise TaskError(
                f"the float32 baseline ran before but failed in the confirmation: {failed}"
            ) from failed
        reason = f"ran before but failed in the confirmation: {failed}"
        self.findings.refusals.append(Refusal(failed.recipe.policy.value, reason))

    def _run(self, left: Sequence[Proven]) -> None:
        plain, findings = self.plain, self.findings
        findings.baseline = plain
        findings.choice = Choice(
            plain, Ratio(1.0, 1.0, 1.0, 0), "the baseline is the fastest recipe"
        )
        others = [p for p in left if p.recipe.key() != plain.key()]
        others = [p for p in others if p.rate >= _NEAR * others[0].rate][:_FINALISTS]
        if not others:
            return
        if len(others) > 1:
            self.work.listener(Stage("finish", "finalists in alternation"))
            rounds = max(_FEWEST_ROUNDS, self.work.options.rounds // 2 + 1)
            finals = self._alternate([plain, *(p.recipe for p in others)], rounds)
            leader = choose(finals[0], finals[1:], baseline_allowed=False)
            if self.work.float32_allowed and leader.ratio.high < 1.0:
                findings.choice = self._choose(finals)
                return
            others = [p for p in others if p.recipe.key() == leader.recipe.key()]
        if others:
            self._confirm(others[0])

    def _choose(self, finals: Sequence[Finalist]) -> Choice:
        allowed = self.work.float32_allowed
        return choose(finals[0], finals[1:], baseline_allowed=allowed)

    def _confirm(self, winner: Proven) -> None:
        """Measure the winner against the baseline, and against what differs from it in one thing.

        That is float32 at its own batch, and where that is in doubt itself without kept memory.
        """
        self.work.listener(Stage("finish", "the winner against float32"))
        same, giving = self._same_batch(winner), self._giving_back(winner.recipe)
        beside = [r for r in (same, giving) if r is not None and r.key() != self.plain.key()]
        try:
            finals = self._against(winner, beside)
        except FinalistFailed as failed:
            if failed.recipe.key() not in {r.key() for r in beside}:
                raise
            same, beside = None, []  # they do not run at this batch: nothing to compare with
            finals = self._against(winner, beside)
        of = {final.recipe.key(): final for final in finals}
        rivals = [of[r.key()] for r in (winner.recipe, giving) if r is not None and r.key() in of]
        findings, baseline = self.findings, of[self.plain.key()]
        findings.choice = self._choose([baseline, *rivals])
        if findings.choice.recipe.key() == self.plain.key():
            return
        chosen = of[findings.choice.recipe.key()]
        findings.proven = replace(winner, recipe=chosen.recipe)
        findings.speedup = paired_ratio(chosen.rates, baseline.rates)
        if same is not None:
            findings.speedup_same_batch = paired_ratio(chosen.rates, of[same.key()].rates)

    def _same_batch(self, winner: Proven) -> Recipe | None:
        """Float32 at the winner's batch, memory kept as the winner does.

        None where that is the winner, or takes long.
        """
        recipe = winner.recipe
        same = replace(
            self.plain,
            batch_size=recipe.batch_size,
            accumulation_steps=recipe.accumulation_steps,
            knobs={KEEP_MEMORY: True} if recipe.keeps_memory else {},
        )
        turns = self.work.options.rounds + _READY
        if turns * max(TURN_SECONDS, self._step_seconds(same)) > _BESIDE_SECONDS:
            return None
        return None if same.key() == recipe.key() else same

    def _step_seconds(self, float32: Recipe) -> float:
        """What a step in float32 takes: as measured, else by the baseline's, as it is larger."""
        measured, plain = map(self.findings.trial_of, (float32, self.plain))
        if measured is not None:
            return measured.step_seconds
        larger = float32.effective_batch / self.plain.effective_batch
        return 0.0 if plain is None else larger * plain.step_seconds

    def _giving_back(self, recipe: Recipe) -> Recipe | None:
        """The recipe without kept memory, where nobody knows yet whether that pays."""
        if not recipe.keeps_memory or self.memory_pays(recipe.batch_size):
            return None
        return replace(recipe, knobs={k: v for k, v in recipe.knobs.items() if k != KEEP_MEMORY})

    def _against(self, winner: Proven, beside: Sequence[Recipe]) -> tuple[Finalist, ...]:
        """The baseline, the winner and those beside it in alternation."""
        recipes = list({r.key(): r for r in (self.plain, winner.recipe, *beside)}.values())
        rounds = self.work.options.rounds

        def running(finals: tuple[Finalist, ...]) -> Collection[int]:
            ran = len(finals[0].rates)
            over = ran >= rounds and (_hopeless(finals) or (ran == rounds and _faster(finals)))
            return () if over else everybody(finals)

        return self._alternate(recipes, 2 * rounds, running)

    def _alternate(
        self,
        recipes: Sequence[Recipe],
        rounds: int,
        running: StillRunning = everybody,
    ) -> tuple[Finalist, ...]:
        return contest_among(
            self.work,
            recipes,
            rounds,
            self.findings,
            self.runner,
            running,
            make_runner=self.make_runner,
        )


def _hopeless(finals: Sequence[Finalist]) -> bool:
    """Whether the winner does not even seem faster than the baseline by what is worth it."""
    return paired_ratio(finals[1].rates, finals[0].rates).ratio <= 1.0 + WORTH


def _faster(finals: Sequence[Finalist]) -> bool:
    """Whether the winner is surely faster; asked once only: who asks until it is so is misled."""
    return paired_ratio(finals[1].rates, finals[0].rates).low > 1.0
