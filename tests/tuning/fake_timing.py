"""Interleaved timing with rates by formula, and confirmations that use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from factories import steady

from autoprec.core.dtypes import Policy
from autoprec.core.measurement import TaskFacts
from autoprec.core.recipe import KEEP_MEMORY, Recipe
from autoprec.core.speed.selection import Finalist
from autoprec.core.speed.space import Space
from autoprec.core.speed.trial_results import Outcome, Status
from autoprec.tuning.confirmation.choice import confirm
from autoprec.tuning.events import silent
from autoprec.tuning.race.interleaved_timing import (
    SelectRemaining,
    keep_all,
)
from autoprec.tuning.race.sessions import FinalistFailed
from autoprec.tuning.stage_results import (
    REFERENCE,
    ConfirmationResult,
    FinalistLost,
    ProofResult,
    ProvenRecipe,
    SearchResult,
)
from autoprec.tuning.time_limit import Deadline
from autoprec.tuning.trials import Trials
from autoprec.workers.failures import FailureKind, WorkerFailure

SPACE = Space(
    policies=(Policy.MIXED_BFLOAT16, Policy.FLOAT32),
    batch_sizes=(16, 32, 64),
    knobs={KEEP_MEMORY: (False, True)},
)
PLAIN = Recipe(batch_size=32)
COMPILED = replace(PLAIN, batch_size=64, compile=True)
FAST = {size: Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=size) for size in (32, 64)}
RUNNER = SimpleNamespace(drop=lambda: None, drop_spare=lambda: None, spare=[])
JOB = cast(
    Any,
    SimpleNamespace(
        task=SimpleNamespace(plain=True),
        options=SimpleNamespace(rounds=5, seed=0, attribute=False, baseline=None),
        listener=silent,
        memory_bytes=None,
        float32_allowed=True,
        runner=None,
        contention_monitor=None,
        on_cpu=True,
        deadline=Deadline(),
    ),
)


def proven(recipe: Recipe) -> ProvenRecipe:
    return ProvenRecipe(recipe, REFERENCE, rate=10.0 * recipe.batch_size, step_seconds=0.1)


class FakeTiming:
    """A contest in which some recipes fail; everybody's rate goes with the batch and policy."""

    failing: tuple[str, ...] = ()
    round_seconds = 0.0

    def __init__(self, recipes: Sequence[Recipe], *_: object, **__: object) -> None:
        self.recipes = recipes
        self.measured = [[steady(0.1, self.rate(r) / 10)] for r in recipes]

    @staticmethod
    def rate(recipe: Recipe) -> float:
        return (
            recipe.batch_size * (2.0 if recipe.policy.mixed else 1.0) * (1 + 0.2 * recipe.compile)
        )

    def __enter__(self) -> FakeTiming:
        return self

    def __exit__(self, *_: object) -> None: ...

    def run(self, rounds: int, running: SelectRemaining = keep_all) -> tuple[Finalist, ...]:
        for recipe in self.recipes:
            if recipe.key() in self.failing:
                raise FinalistFailed(recipe, WorkerFailure(FailureKind.OUT_OF_MEMORY, "no room"))
        for number in range(1, rounds + 1):
            finals = self.finals(number)
            if not running(finals):
                break
        return finals

    def finals(self, rounds: int) -> tuple[Finalist, ...]:
        return tuple(Finalist(r, (self.rate(r),) * rounds) for r in self.recipes)


def attempt(
    search: SearchResult, proven: Sequence[ProvenRecipe], lost: FinalistLost | None = None
) -> ConfirmationResult | FinalistLost:
    """Confirm once; the result may be that a finalist failed."""
    proof = ProofResult(tuple(proven))
    return confirm(JOB, search, proof, cast(Any, RUNNER), lost)


def confirmed(search: SearchResult, proven: Sequence[ProvenRecipe]) -> ConfirmationResult:
    """Confirm recipes of which none fails."""
    result = attempt(search, proven)
    assert isinstance(result, ConfirmationResult)
    return result


def search_of(history: tuple[Outcome, ...]) -> SearchResult:
    task = TaskFacts("torch", {}, 32, 32, 1000)
    return SearchResult(Trials(task, SPACE, history), SPACE.point(PLAIN))


def searched(*rates: tuple[Recipe, float]) -> SearchResult:
    """A search that saw these recipes, in samples per second."""
    return search_of(
        tuple(
            Outcome(SPACE.point(recipe), Status.OK, steady(0.1, rate / 10))
            for recipe, rate in rates
        )
    )


KEPT = replace(FAST[64], knobs={KEEP_MEMORY: True})


class Several(FakeTiming):
    """Precision brings 1.5, the batch as much as it is larger, kept memory 1.1."""

    @staticmethod
    def rate(recipe: Recipe) -> float:
        precision = 1.5 if recipe.policy.mixed else 1.0
        return recipe.batch_size * precision * (1.1 if recipe.keeps_memory else 1.0)


def at(stage: type[FakeTiming]) -> SearchResult:
    """What a search sees where everything runs at this stage's rates."""
    recipes = map(SPACE.recipe, SPACE.points())
    return searched(*((recipe, stage.rate(recipe)) for recipe in recipes))


def loaded(*ratios: float) -> type[FakeTiming]:
    """A contest on a machine where the winner's ratio to the baseline goes up and down."""

    class Loaded(FakeTiming):
        def finals(self, rounds: int) -> tuple[Finalist, ...]:
            rates = tuple(320.0 * ratio for ratio in (ratios * rounds)[:rounds])
            plain = (320.0,) * rounds
            return tuple(Finalist(r, plain if r == PLAIN else rates) for r in self.recipes)

    return Loaded


def raced(search: SearchResult, stage: type[FakeTiming], *recipes: Recipe) -> SearchResult:
    """The search with three rounds of a race between these at the stage's rates."""
    finalists = tuple(Finalist(each, (stage.rate(each),) * 3) for each in recipes)
    return replace(search, finalists=finalists)
