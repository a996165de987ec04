"""Ablations: recipes that are timed next to another one, with one of its settings switched off.

Rivals are simpler recipes that may be chosen instead, because a setting is kept only where it wins
by itself. Parts attribute the speedup of the choice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autoprec.core.numerics.reference_recipe import is_exact
from autoprec.core.profile import Present
from autoprec.core.recipe import (
    COMPILE_MODE,
    COMPILE_SCOPE,
    KEEP_MEMORY,
    Distributed,
    Recipe,
    communication_settings,
)
from autoprec.core.speed.acquisition import fit_model
from autoprec.core.speed.assumptions import SPEED
from autoprec.core.speed.attribution import (
    PRECISION,
    baseline_at_batch_of,
    switch_off_in_turn,
)
from autoprec.core.speed.keep_memory import clearly_pays
from autoprec.core.speed.noise import paired_ratio
from autoprec.tuning.job import TuningJob
from autoprec.tuning.race.interleaved_timing import (
    fit_in_memory_together,
    shares_worker,
    turns_worth,
)
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
        left = (KEEP_MEMORY, COMPILE_MODE, COMPILE_SCOPE)
        knobs = [name for name in winner.knobs if name not in left]
        switched_off = [{name} for name in knobs]
        switched_off += [{KEEP_MEMORY}] * (winner.keeps_memory and not known)
        switched_off += [set(knobs)] * (len(knobs) > 1)
        without = [
            replace(winner, knobs={k: v for k, v in winner.knobs.items() if k not in names})
            for names in switched_off
        ]
        without += _without_communication_settings(winner)
        return [recipe for recipe in without if recipe.key() != search.baseline.key()]

    def rivals(self, recipe: Recipe) -> list[Recipe]:
        """Return the recipes that may be chosen instead of one, as far as time and memory allow.

        Those are the simpler ones, and what is float32 at its batch: whatever precision brings less
        than the rest is not worth its rounding.
        """
        simpler = self.simpler(recipe)
        plain = [
            step
            for each in (recipe, *simpler)
            for step in switch_off_in_turn(each, self.search.baseline)
            if is_exact(step.recipe) and step.recipe.batch_size == recipe.batch_size
        ]
        alike = [step.recipe for step in plain if step.what == PRECISION]
        rest = [step.recipe for step in plain]
        return self._affordable([recipe, *simpler, *alike[:1]], rest, new_processes=False)

    def parts(self, recipe: Recipe) -> list[Recipe]:
        """Return what lies between a recipe and the baseline, as far as time and memory allow.

        What the result is told over always runs: float32 with the recipe's settings, plain float32
        at its batch, and what the user trains with already; if asked for, so does every part.
        """
        plain = self.search.baseline
        steps = switch_off_in_turn(recipe, plain)
        alike = baseline_at_batch_of(recipe, plain).key()
        every = self.job.options.attribute
        told = [s.recipe for s in steps if every or s.what == PRECISION or s.recipe.key() == alike]
        told += [] if self.present is None else [self.present]
        return self._affordable([recipe, *told], [step.recipe for step in steps])

    @property
    def present(self) -> Recipe | None:
        """Return what the user says to train with today; None for plain float32."""
        policy = self.job.options.baseline
        return None if policy is None else self.search.baseline.with_policy(policy)

    def gain_over_present(
        self, recipe: Recipe, rates: Mapping[str, Sequence[float]]
    ) -> Present | None:
        """Return what a recipe gains over what the user trains with; None if that did not run."""
        present = self.present
        if present is None or present.key() not in rates:
            return None
        if present.key() == recipe.key():
            return Present(present.policy)
        return Present(present.policy, paired_ratio(rates[recipe.key()], rates[present.key()]))

    def _affordable(
        self, given: Sequence[Recipe], more: Sequence[Recipe], *, new_processes: bool = True
    ) -> list[Recipe]:
        """Return `given` but the first and the baseline, and of `more` as many as can be timed."""
        baseline = self.search.baseline
        found = {recipe.key(): recipe for recipe in (baseline, *given)}
        left = SPEED.comparison_seconds
        for recipe in more:
            needed = self.seconds(recipe, new_processes=new_processes)
            if (
                recipe.key() not in found
                and needed <= left
                and fit_in_memory_together(self.job, [*found.values(), recipe], self.search.trials)
            ):
                found[recipe.key()] = recipe
                left -= needed
        return [recipe for recipe in found.values() if recipe not in (baseline, given[0])]

    def seconds(self, recipe: Recipe, *, new_processes: bool = True) -> float:
        """Return the seconds that a recipe adds to the fewest rounds, its process included.

        On a CPU each round has `new_processes`, and as many turns as these are worth.
        """
        turn = max(SPEED.turn_seconds, self._step_seconds(recipe))
        shared = shares_worker(self.job, recipe, self.search.trials.framework)
        start = 0.0 if shared else SPEED.worker_seconds
        if new_processes and self.job.on_cpu:
            return SPEED.min_rounds * (start + turn * turns_worth(SPEED.worker_seconds, turn))
        return start + SPEED.min_rounds * turn

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
