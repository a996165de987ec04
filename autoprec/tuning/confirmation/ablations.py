"""Ablations: recipes that are timed next to another one, with one of its settings switched off.

Rivals are simpler recipes that may be chosen instead, because a setting is kept only where it wins
by itself. Parts attribute the speedup of the choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoprec.core.numerics.reference_recipe import is_exact
from autoprec.core.recipe import KEEP_MEMORY, Distributed, Recipe, communication_settings
from autoprec.core.speed.acquisition import fit_model
from autoprec.core.speed.assumptions import SPEED
from autoprec.core.speed.attribution import PRECISION, switch_off_in_turn
from autoprec.core.speed.keep_memory import clearly_pays
from autoprec.tuning.confirmation.interleaved_timing import fit_in_memory_together
from autoprec.tuning.job import TuningJob
from autoprec.tuning.stage_results import SearchResult


@dataclass(frozen=True)
class Ablations:
    """Chooses the ablations of one tuning's winner, within the time and memory there is."""

    job: TuningJob
    search: SearchResult

    def simpler(self, winner: Recipe) -> list[Recipe]:
        """Return the winner without each of its knobs, and without all of them.

        The same for how its ranks communicate. They need no proof of their own: nothing of it
        makes a recipe more exact. Kept memory stays where
        it is known to pay. Policies, layouts, compilation and padding are left alone, because the
        search has compared those one by one already.
        """
        search = self.search
        known = winner.keeps_memory and clearly_pays(
            search.trials.space, search.baseline_point, search.trials.history, winner.batch_size
        )
        knobs = [name for name in winner.knobs if name != KEEP_MEMORY]
        switched_off = [{name} for name in knobs]
        switched_off += [{KEEP_MEMORY}] * (winner.keeps_memory and not known)
        switched_off += [set(knobs)] * (len(knobs) > 1)
        without = [
            replace(winner, knobs={k: v for k, v in winner.knobs.items() if k not in names})
            for names in switched_off
        ]
        without += _without_communication_settings(winner)
        return [recipe for recipe in without if recipe.key() != search.baseline.key()]

    def rivals(self, recipe: Recipe, step_seconds: float | None = None) -> list[Recipe]:
        """Return the recipes that may be chosen instead of one, as far as time and memory allow.

        Those are the simpler ones, and what is float32 at its batch: whatever precision brings less
        than the rest is not worth its rounding. `step_seconds` are those of the recipe, if known.
        """
        simpler = self.simpler(recipe)
        plain = [
            step
            for each in (recipe, *simpler)
            for step in switch_off_in_turn(each, self.search.baseline)
            if is_exact(step.recipe) and step.recipe.batch_size == recipe.batch_size
        ]
        plain.sort(key=lambda step: step.what != PRECISION)
        more = [step.recipe for step in plain]
        return self._affordable([recipe, *simpler], more, step_seconds)

    def parts(self, recipe: Recipe, step_seconds: float | None) -> list[Recipe]:
        """Return what lies between a recipe and the baseline, as far as time and memory allow."""
        steps = [*switch_off_in_turn(recipe, self.search.baseline)]
        steps.sort(key=lambda step: step.what != PRECISION)
        return self._affordable([recipe], [step.recipe for step in steps], step_seconds)

    def _affordable(
        self, given: Sequence[Recipe], more: Sequence[Recipe], step_seconds: float | None
    ) -> list[Recipe]:
        """Return the recipes but the first and the baseline; of `more` as many as can be timed.

        The first of those always runs: it shows what precision brings.
        """
        baseline = self.search.baseline
        found = {recipe.key(): recipe for recipe in (baseline, *given)}
        known = self._step_seconds(given[0]) if step_seconds is None else step_seconds
        left = max(SPEED.comparison_seconds, self._turns_seconds(known) + self.seconds(baseline))
        for recipe in more:
            needed = self.seconds(recipe)
            affordable = recipe == more[0] or (
                needed <= left
                and fit_in_memory_together(self.job, [*found.values(), recipe], self.search.trials)
            )
            if recipe.key() not in found and affordable:
                found[recipe.key()] = recipe
                left -= needed
        return [recipe for recipe in found.values() if recipe not in (baseline, given[0])]

    def seconds(self, recipe: Recipe) -> float:
        """Return the seconds that timing a recipe in all rounds takes."""
        return self._turns_seconds(self._step_seconds(recipe))

    def _turns_seconds(self, step_seconds: float) -> float:
        return (self.job.options.rounds + SPEED.setup_turns) * max(SPEED.turn_seconds, step_seconds)

    def _step_seconds(self, recipe: Recipe) -> float:
        """Return a recipe's step time, as the cost model predicts it where it was not measured.

        A step of a larger batch takes longer in proportion only where it keeps the device busy.
        """
        trials, baseline = self.search.trials, self.search.baseline
        measured, base = map(trials.measurement_of, (recipe, baseline))
        if measured is not None or base is None:
            return 0.0 if measured is None else measured.step_seconds
        model = fit_model([outcome for outcome in trials.history if outcome.rate > 0])
        plain, other = (model.predict(trials.space.point(each)) for each in (baseline, recipe))
        larger = recipe.effective_batch / baseline.effective_batch
        return base.step_seconds * larger * math.exp(plain.mean - other.mean)


def _without_communication_settings(winner: Recipe) -> list[Recipe]:
    """Return the winner without each setting of how its ranks communicate, and without all."""
    ranks, changed = winner.distributed, communication_settings(winner)
    if ranks is None:
        return []
    switched_off = [{name} for name in changed] + [set(changed)] * (len(changed) > 1)
    default = Distributed()
    return [
        replace(
            winner,
            distributed=replace(ranks, **{name: getattr(default, name) for name in names}),
        )
        for names in switched_off
    ]
