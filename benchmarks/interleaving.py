"""Recipes measured against each other as the benchmarks do: in alternation, over many processes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autoprec.core.recipe import Recipe
from autoprec.core.speed.noise import paired_ratio
from autoprec.core.speed.selection import Finalist
from autoprec.tuning.job import TuningJob
from autoprec.tuning.race.interleaved_timing import InterleavedTiming
from autoprec.tuning.race.sessions import FinalistFailed
from autoprec.workers.cpu_contention import ContentionMonitor

#: Processes of each recipe, at least.
PROCESSES = 6


def interleaved(
    job: TuningJob, recipes: Sequence[Recipe], together: bool, concurrently: bool | None = None
) -> InterleavedTiming:
    """Recipes in alternation, each in a process of its own.

    `concurrently` opens the sessions side by side; by default not on an accelerator.
    """
    return InterleavedTiming(
        recipes,
        job.runner(),
        shares=lambda recipe: False,
        seed=0,
        together=together,
        concurrently=job.on_cpu if concurrently is None else concurrently,
        listener=lambda event: None,
        contention_monitor=ContentionMonitor(print),
    )


@dataclass(frozen=True)
class Sharpness:
    """How far an alternation goes on.

    Until the 95 % intervals of these recipes' ratios to the first of them are all narrower than
    `width`, as a share of the ratio, or `seconds` are over.
    """

    recipes: tuple[Recipe, ...] = ()
    width: float = 0.04
    seconds: float = 300.0

    def reached(self, rates: Mapping[str, Sequence[float]], seconds: float) -> bool:
        """Whether it may end after so many seconds with these rates by the recipes' keys."""
        own = [rates[recipe.key()] for recipe in self.recipes]
        ratios = [paired_ratio(each, own[0]) for each in own]
        sharp = all(r.high - r.low <= self.width * r.ratio for r in ratios)
        return sharp or seconds >= self.seconds


def give_up(failed: FinalistFailed) -> None:
    """End an alternation at the first failure of a recipe."""
    raise failed


def alternate(
    job: TuningJob,
    recipes: Sequence[Recipe],
    peaks: Mapping[str, int],
    rounds: int,
    sharpness: Sharpness | None = None,
    on_failure: Callable[[FinalistFailed], None] = give_up,
) -> dict[str, list[float]]:
    """Rates of the recipes, by their keys, in alternating rounds; equal recipes run once.

    Each has `PROCESSES` processes, one after the other: where a process lies in memory moves a step
    by a few per cent, which no number of rounds in one process shows. Every second time they run in
    reverse order. Further ones follow for as long as `sharpness` wants them. `peaks` are the
    recipes' bytes by the same keys, where known.

    Where a recipe fails and `on_failure` does not raise, what its processes measured is dropped,
    and others take their place; from then on one recipe at a time is in memory, since a peak is not
    the same in every process. Then each has its rounds one after the other, in a process of its
    own: one that kept what another recipe freed has less room.
    """
    sharpness = sharpness or Sharpness()
    unique = list({recipe.key(): recipe for recipe in recipes}.values())
    room = job.memory_bytes or 0
    rates: dict[str, list[float]] = {recipe.key(): [] for recipe in unique}
    together = sum(peaks.get(recipe.key(), room) for recipe in unique) <= room
    began, processes = time.monotonic(), 0
    while processes < PROCESSES or not sharpness.reached(rates, time.monotonic() - began):
        ordered = unique[:: -1 if processes % 2 else 1]
        finals: list[Finalist] = []
        try:
            for beside in [ordered] if together else [[recipe] for recipe in ordered]:
                with interleaved(job, beside, together=True) as timing:
                    finals += timing.run(math.ceil(rounds / PROCESSES))
        except FinalistFailed as failed:
            on_failure(failed)
            together = False
            continue
        for final in finals:
            rates[final.recipe.key()] += final.rates
        processes += 1
    return rates
