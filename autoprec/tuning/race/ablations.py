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
from autoprec.core.speed.assumptions import SPEED
from autoprec.core.speed.attribution import (
    PRECISION,
    baseline_at_batch_of,
    switch_off_in_turn,
)
from autoprec.core.speed.keep_memory import clearly_pays
from autoprec.core.speed.noise import paired_ratio
from autoprec.core.speed.rounds import turns_worth
from autoprec.tuning.job import TuningJob
from autoprec.tuning.race.interleaved_timing import fit_in_memory_together, shares_worker
from autoprec.tuning.race.sessions import LONGEST_WARM_STEP_SECONDS
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
        trials = self.search.trials
        turn = max(SPEED.turn_seconds, trials.step_seconds_of(recipe, self.search.baseline))
        shared = shares_worker(self.job, recipe, trials.framework)
        start = 0.0 if shared else SPEED.worker_seconds
        if new_processes and self.job.on_cpu:
            return SPEED.min_rounds * (start + turn * turns_worth(SPEED.worker_seconds, turn))
        return start + SPEED.min_rounds * turn

    def in_time(
        self, recipes: Sequence[Recipe], share: float, *, new_processes: bool
    ) -> list[Recipe]:
        """Return the first two recipes and of the others as many as can be timed in time.

        That is in the fewest rounds before this share of the time limit has passed; none where that
        is too late for two.
        """
        left = self.job.deadline.left(share)
        found: list[Recipe] = []
        for recipe in recipes if math.isfinite(left) else ():
            seconds = self._seconds_of_rounds([*found, recipe], new_processes=new_processes)
            if seconds <= left:
                found.append(recipe)
            elif len(found) < 2:
                return []
        return found if math.isfinite(left) else list(recipes)

    def _seconds_of_rounds(self, recipes: Sequence[Recipe], *, new_processes: bool) -> float:
        """Return what the fewest rounds of these recipes are expected to take.

        A session is opened and warmed up by one step at least, and so is every turn of short steps;
        where memory does not hold all of them, it is opened for every turn.
        """
        trials, baseline = self.search.trials, self.search.baseline
        steps = [trials.step_seconds_of(recipe, baseline) for recipe in recipes]
        alone = sum(not shares_worker(self.job, each, trials.framework) for each in recipes)
        timed = sum(max(SPEED.turn_seconds, step) for step in steps)
        turns = timed + sum(step for step in steps if step < LONGEST_WARM_STEP_SECONDS)
        ready = sum(map(trials.ready_seconds_of, recipes)) + timed
        if not fit_in_memory_together(self.job, recipes, trials):
            turns += ready
        ready += SPEED.worker_seconds * max(1, alone)
        if new_processes and self.job.on_cpu:
            return SPEED.min_rounds * (ready + turns_worth(ready, turns) * turns)
        return ready + SPEED.min_rounds * turns


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
