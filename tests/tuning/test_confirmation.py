"""The finish when a finalist fails that ran before: something smaller takes its place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
from factories import steady

from autoprec.core.device.facts import DeviceKind
from autoprec.core.dtypes import Policy
from autoprec.core.measurement import TaskFacts
from autoprec.core.recipe import KEEP_MEMORY, Recipe
from autoprec.core.speed.selection import Finalist
from autoprec.core.speed.space import Space, point_key
from autoprec.core.speed.trial_results import Outcome, Status
from autoprec.core.statistics import Ratio
from autoprec.errors import TaskError
from autoprec.tuning import interleaved_timing as module
from autoprec.tuning.confirmation import Confirmation
from autoprec.tuning.events import silent
from autoprec.tuning.interleaved_timing import FinalistFailed, SelectRemaining, keep_all
from autoprec.tuning.profile_builder import REFERENCE, Findings, ProvenRecipe
from autoprec.tuning.time_limit import Deadline
from autoprec.workers.failures import FailureKind, WorkerFailure
from tests.core.device.test_policies import facts as device

SPACE = Space(
    policies=(Policy.MIXED_BFLOAT16, Policy.FLOAT32),
    batch_sizes=(16, 32, 64),
    knobs={KEEP_MEMORY: (False, True)},
)
PLAIN = Recipe(batch_size=32)
COMPILED = replace(PLAIN, batch_size=64, compile=True)
FAST = {size: Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=size) for size in (32, 64)}
RUNNER = SimpleNamespace(drop=lambda: None)
JOB = cast(
    Any,
    SimpleNamespace(
        options=SimpleNamespace(rounds=5, seed=0),
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


class Stage:
    """A contest in which some recipes fail; everybody's rate goes with the batch and policy."""

    failing: tuple[str, ...] = ()

    def __init__(self, recipes: Sequence[Recipe], *_: object, **__: object) -> None:
        self.recipes = recipes
        self.measured = [[steady(0.1, self.rate(r) / 10)] for r in recipes]

    @staticmethod
    def rate(recipe: Recipe) -> float:
        return (
            recipe.batch_size * (2.0 if recipe.policy.mixed else 1.0) * (1 + 0.2 * recipe.compile)
        )

    def __enter__(self) -> Stage:
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


def finish(
    findings: Findings,
    proven: Sequence[ProvenRecipe],
    substitute: Callable[[Recipe], ProvenRecipe | None] = lambda failed: None,
    *,
    memory_pays: bool = True,
) -> None:
    last = Confirmation(
        JOB, cast(Any, RUNNER), PLAIN, findings, cast(Any, None), lambda batch: memory_pays
    )
    last.run(proven, substitute)


def searched(*rates: tuple[Recipe, float]) -> tuple[Outcome, ...]:
    """What the search saw, in samples per second."""
    return tuple(
        Outcome(SPACE.point(recipe), Status.OK, steady(0.1, rate / 10)) for recipe, rate in rates
    )


@pytest.fixture
def findings(monkeypatch: pytest.MonkeyPatch) -> Findings:
    monkeypatch.setattr(module, "InterleavedTiming", Stage)
    monkeypatch.setattr(Stage, "failing", ())
    outcomes = tuple(
        Outcome(point, Status.OK, steady(0.1, Stage.rate(SPACE.recipe(point)) / 10))
        for point in SPACE.points()
    )
    return Findings(device(DeviceKind.CPU), TaskFacts("torch", {}, 32, 32, 1000), outcomes, SPACE)


def test_a_smaller_batch_takes_the_place_of_one_that_fails(
    findings: Findings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stage, "failing", (FAST[64].key(),))
    asked = []

    def substitute(failed: Recipe) -> ProvenRecipe:
        asked.append(failed.batch_size)
        return proven(FAST[32])

    finish(findings, [proven(FAST[64])], substitute)
    assert asked == [64]
    assert findings.choice is not None
    assert findings.choice.recipe == FAST[32]
    assert "failed in the confirmation" in findings.refusals[0].reason


def test_without_a_substitute_the_baseline_is_the_answer(
    findings: Findings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stage, "failing", (FAST[64].key(),))
    finish(findings, [proven(FAST[64])])
    assert findings.choice is not None
    assert findings.choice.recipe == PLAIN


def test_a_baseline_that_fails_now_ends_the_tuning(
    findings: Findings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stage, "failing", (PLAIN.key(),))
    with pytest.raises(TaskError, match="baseline ran before but failed"):
        finish(findings, [proven(FAST[32])])


def test_a_float32_winner_with_other_settings_is_compared_at_its_own_batch(
    findings: Findings,
) -> None:
    """Otherwise nobody could tell whether the larger batch or the compiler helped."""
    finish(findings, [proven(COMPILED)])
    assert findings.speedup is not None
    assert findings.speedup.ratio == pytest.approx(2.4)
    assert findings.speedup_same_batch is not None
    assert findings.speedup_same_batch.ratio == pytest.approx(1.2)
    assert [(p.what, round(p.speedup.ratio, 6)) for p in findings.waterfall] == [
        ("compiled", 1.2),
        ("batch", 2.0),
    ]


def test_a_larger_batch_alone_has_no_other_float32_to_be_compared_with(
    findings: Findings,
) -> None:
    finish(findings, [proven(replace(PLAIN, batch_size=64))])
    assert findings.speedup is not None
    assert findings.speedup_same_batch is None


class Disturbed(Stage):
    """In the first round a neighbour slows all but the baseline."""

    def finals(self, rounds: int) -> tuple[Finalist, ...]:
        return tuple(
            replace(f, rates=(f.rates[0] / 4, *f.rates[1:])) if f.recipe != PLAIN else f
            for f in super().finals(rounds)
        )


def test_one_disturbed_round_does_not_make_a_fast_recipe_lose(
    findings: Findings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "InterleavedTiming", Disturbed)
    finish(findings, [proven(FAST[64]), replace(proven(FAST[32]), rate=620.0)])
    assert findings.choice is not None
    assert findings.choice.recipe == FAST[64]
    assert findings.speedup is not None
    assert findings.speedup.rounds == 10  # five were not enough to tell


def test_who_loses_the_lead_in_further_rounds_is_not_measured_to_the_end(
    findings: Findings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four rounds of five were faster by 20 %, then none."""

    class Fading(Stage):
        def finals(self, rounds: int) -> tuple[Finalist, ...]:
            luck = (1.2, 1.2, 0.9, 1.2, 1.2, *(0.8,) * rounds)[:rounds]
            return tuple(Finalist(r, (1.0,) * rounds if r == PLAIN else luck) for r in self.recipes)

    monkeypatch.setattr(module, "InterleavedTiming", Fading)
    findings.history = searched((PLAIN, 1.0), (FAST[64], 1.2))
    finish(findings, [proven(FAST[64])])
    assert findings.choice is not None
    assert findings.choice.recipe == PLAIN
    assert findings.choice.ratio.rounds == 7


def test_finalists_that_are_all_slower_are_not_measured_again(
    findings: Findings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stage, "rate", staticmethod(lambda r: 1.0 if r.policy.mixed else 2.0))
    asked: list[int] = []
    plainly = Stage.run

    def run(self: Stage, rounds: int, running: SelectRemaining) -> tuple[Finalist, ...]:
        asked.append(rounds)
        return plainly(self, rounds, running)

    monkeypatch.setattr(Stage, "run", run)
    finish(findings, [proven(FAST[64]), proven(FAST[32])])
    assert findings.choice is not None
    assert findings.choice.recipe == PLAIN
    assert len(asked) == 1


KEPT = replace(FAST[64], knobs={KEEP_MEMORY: True})


class Keeping(Stage):
    """Keeping memory is worth `gain`."""

    gain = 1.0

    @classmethod
    def rate(cls, recipe: Recipe) -> float:  # type: ignore[override]
        return Stage.rate(recipe) * (cls.gain if recipe.keeps_memory else 1.0)


@pytest.mark.parametrize(("gain", "kept"), [(1.3, True), (1.01, False)])
def test_memory_is_kept_only_where_it_pays_at_the_winner(
    findings: Findings, monkeypatch: pytest.MonkeyPatch, gain: float, kept: bool
) -> None:
    monkeypatch.setattr(module, "InterleavedTiming", Keeping)
    monkeypatch.setattr(Keeping, "gain", gain)
    finish(findings, [proven(KEPT)], memory_pays=False)
    assert findings.proven is not None
    assert findings.proven.recipe.keeps_memory is kept
    assert findings.speedup is not None
    assert findings.speedup.ratio == pytest.approx(4.0 * (gain if kept else 1.0))


def test_where_the_baseline_left_no_doubt_the_winner_is_not_run_without_it(
    findings: Findings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "InterleavedTiming", Keeping)
    finish(findings, [proven(KEPT)])
    assert findings.proven is not None
    assert findings.proven.recipe == KEPT
    assert FAST[64].key() not in findings.finals


class Knobs(Stage):
    """A contest in which the knobs have a worth of their own each."""

    worth: ClassVar[dict[str, float]] = {}

    @classmethod
    def rate(cls, recipe: Recipe) -> float:  # type: ignore[override]
        gains = [cls.worth.get(name, 1.0) for name, value in recipe.knobs.items() if value]
        return Stage.rate(recipe) * math.prod(gains)


@pytest.mark.parametrize(
    ("fused", "implicit", "kept"),
    [
        (1.1, 1.1, {"fused_optimizer", "implicit_bfloat16"}),
        (0.95, 1.1, {"implicit_bfloat16"}),  # the search had taken it for faster
        (1.1, 0.8, {"fused_optimizer"}),
        (1.005, 1.1, {"implicit_bfloat16"}),  # it brings nothing
        (0.95, 0.95, set()),
    ],
)
@pytest.mark.parametrize("policy", [Policy.MIXED_BFLOAT16, Policy.FLOAT32])
def test_a_knob_is_kept_only_where_it_wins_by_itself(
    findings: Findings,
    monkeypatch: pytest.MonkeyPatch,
    fused: float,
    implicit: float,
    kept: set[str],
    policy: Policy,
) -> None:
    monkeypatch.setattr(module, "InterleavedTiming", Knobs)
    monkeypatch.setattr(Knobs, "worth", {"fused_optimizer": fused, "implicit_bfloat16": implicit})
    knobs = {"fused_optimizer": True, "implicit_bfloat16": True}
    finish(findings, [proven(Recipe(policy, 64, knobs=knobs))])
    assert findings.proven is not None
    assert set(findings.proven.recipe.knobs) == kept
    assert findings.speedup is not None
    worth = math.prod({"fused_optimizer": fused, "implicit_bfloat16": implicit}[k] for k in kept)
    assert findings.speedup.ratio == pytest.approx(Stage.rate(Recipe(policy, 64)) / 32 * worth)


@pytest.mark.parametrize("size", [64, 32])
def test_a_comparison_that_would_take_long_is_left_out(findings: Findings, size: int) -> None:
    """Known from its own trial, or else from the baseline's."""
    step = 0.8 * size / 32
    slow = steady(step, step * size)
    findings.history = tuple(
        replace(o, measurement=slow)
        for o in findings.history
        if (o.point["policy"], o.point["batch_size"]) == ("float32", size)
    )
    finish(findings, [proven(FAST[64])])
    assert findings.speedup is not None
    assert findings.speedup_same_batch is None


# What the speed-up is due to ---------------------------------------------------------------------


class Several(Stage):
    """Precision brings 1.5, the batch as much as it is larger, kept memory 1.1."""

    @staticmethod
    def rate(recipe: Recipe) -> float:
        precision = 1.5 if recipe.policy.mixed else 1.0
        return recipe.batch_size * precision * (1.1 if recipe.keeps_memory else 1.0)


def at(stage: type[Stage]) -> tuple[Outcome, ...]:
    """What a search sees where everything runs at this stage's rates."""
    recipes = map(SPACE.recipe, SPACE.points())
    return searched(*((recipe, stage.rate(recipe)) for recipe in recipes))


def test_the_parts_of_a_speedup_are_measured_and_multiply_to_the_whole(
    findings: Findings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "InterleavedTiming", Several)
    findings.history = at(Several)
    finish(findings, [proven(KEPT)])
    assert findings.speedup is not None
    assert findings.speedup.ratio == pytest.approx(3.3)
    assert [(p.what, round(p.speedup.ratio, 6), p.against) for p in findings.waterfall] == [
        ("precision", 1.5, "float32, batch 64, memory kept"),
        ("batch", 2.0, "float32, batch 32, memory kept"),
        ("kept memory", 1.1, "float32, batch 32"),
    ]


def test_parts_that_would_take_long_are_one(
    findings: Findings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may take as long as winner and baseline; what precision brings is asked first."""
    monkeypatch.setattr(module, "InterleavedTiming", Several)
    between = replace(PLAIN, knobs={KEEP_MEMORY: True})
    steps = {point_key(SPACE.point(between)): 0.7}
    findings.history = tuple(
        replace(o, measurement=steady(step, o.rate * step))
        for o in at(Several)
        for step in (steps.get(point_key(o.point), 0.5),)
    )
    finish(findings, [proven(KEPT)])
    assert [(p.what, round(p.speedup.ratio, 6)) for p in findings.waterfall] == [
        ("precision", 1.5),
        ("batch and kept memory", 2.2),
    ]


class Useless(Stage):
    """Precision brings nothing, and another setting less than that."""

    @staticmethod
    def rate(recipe: Recipe) -> float:
        return recipe.batch_size * (0.91 if recipe.policy.mixed or recipe.compile else 1.0)


@pytest.mark.parametrize("winner", [FAST[64], COMPILED])
def test_what_plain_float32_beats_at_its_own_batch_is_not_the_result(
    findings: Findings, monkeypatch: pytest.MonkeyPatch, winner: Recipe
) -> None:
    monkeypatch.setattr(module, "InterleavedTiming", Useless)
    findings.history = at(Useless)
    finish(findings, [proven(winner)])
    assert findings.proven is not None
    assert findings.proven.recipe == replace(PLAIN, batch_size=64)
    assert findings.proven.verdict == REFERENCE
    assert [(p.what, p.speedup.ratio) for p in findings.waterfall] == [("batch", 2.0)]
    assert findings.speedup_same_batch is None


# What cannot be believed -------------------------------------------------------------------------


def loaded(*ratios: float) -> type[Stage]:
    """A contest on a machine where the winner's ratio to the baseline goes up and down."""

    class LoadedTask(Stage):
        def finals(self, rounds: int) -> tuple[Finalist, ...]:
            rates = tuple(320.0 * ratio for ratio in (ratios * rounds)[:rounds])
            plain = (320.0,) * rounds
            return tuple(Finalist(r, plain if r == PLAIN else rates) for r in self.recipes)

    return LoadedTask


@pytest.mark.parametrize(
    ("before", "ratios", "said"),
    [
        ((320.0, 350.0), (0.7, 1.0, 1.48, 1.5, 2.8, 3.2), "which may be anything"),
        ((320.0, 4400.0), (0.44,), "the search saw 13.75x, the final rounds 0.44x"),
        ((3200.0, 4800.0), (1.5,), "float32, batch 32 ran at 3200 samples/s in the search"),
    ],
)
def test_evidence_that_contradicts_itself_leaves_float32(
    findings: Findings,
    monkeypatch: pytest.MonkeyPatch,
    before: tuple[float, float],
    ratios: tuple[float, ...],
    said: str,
) -> None:
    monkeypatch.setattr(module, "InterleavedTiming", loaded(*ratios))
    findings.history = searched((PLAIN, before[0]), (FAST[32], before[1]))
    finish(findings, [proven(FAST[32])])
    assert said in findings.inconclusive
    assert findings.choice is not None
    assert findings.choice.recipe == PLAIN
    assert findings.proven is None


def test_ordinary_noise_is_no_contradiction(
    findings: Findings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One round of six disturbed, and a search that was 60 % off."""
    monkeypatch.setattr(module, "InterleavedTiming", loaded(1.4, 1.45, 1.4, 1.0, 1.42, 1.38))
    findings.history = searched((PLAIN, 320.0), (FAST[32], 720.0))
    finish(findings, [proven(FAST[32])])
    assert findings.inconclusive == ""
    assert findings.proven is not None


@pytest.mark.parametrize(
    ("plain", "rest", "said"),
    [
        (824.0, 900.0, "float32, batch 32 ran at 59300 samples/s in the search and at 824"),
        (50_000.0, 100_000.0, "mixed_bfloat16, batch 32 ran at 824 samples/s in the search"),
        (50_000.0, 824.0, ""),
    ],
)
def test_a_baseline_that_is_far_ahead_of_all_else_runs_again_beside_the_best_of_it(
    findings: Findings, monkeypatch: pytest.MonkeyPatch, plain: float, rest: float, said: str
) -> None:
    """A neighbour came after it, or has gone since, or all else is really that slow."""
    monkeypatch.setattr(module, "InterleavedTiming", Stage)
    monkeypatch.setattr(Stage, "rate", staticmethod(lambda r: plain if r == PLAIN else rest))
    findings.history = searched((PLAIN, 59_300.0), (FAST[32], 824.0))
    finish(findings, [ProvenRecipe(PLAIN, REFERENCE, 59_300.0, 0.1)])
    assert findings.inconclusive.startswith(said)
    assert bool(findings.inconclusive) is bool(said)
    assert findings.choice is not None
    assert findings.choice.recipe == PLAIN


@pytest.mark.parametrize(
    ("seen", "said"),
    [
        (((PLAIN, 10.0),), "nothing else was measured"),
        (((PLAIN, 10.0), (FAST[32], 9.0)), "the baseline is the fastest recipe"),
        (((PLAIN, 10.0), (FAST[32], 19.0)), "the baseline is the fastest recipe that passed"),
    ],
)
def test_why_the_baseline_is_the_answer_is_not_said_of_what_was_not_seen(
    findings: Findings, seen: tuple[tuple[Recipe, float], ...], said: str
) -> None:
    findings.history = searched(*seen)
    finish(findings, [])
    assert findings.choice is not None
    assert findings.choice.reason == said


# What was asked for, and slower ------------------------------------------------------------------


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JOB, "float32_allowed", False)


@pytest.mark.usefixtures("forced")
def test_a_forced_recipe_that_is_slower_by_far_is_not_measured_again(
    findings: Findings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stage, "__enter__", None)  # no contest may begin
    findings.history = searched((PLAIN, 320.0), (FAST[32], 3.2))
    finish(findings, [proven(FAST[32])])
    assert findings.proven is not None
    assert findings.speedup is not None
    assert (findings.speedup.ratio, findings.speedup.rounds) == (pytest.approx(0.01), 1)


@pytest.mark.usefixtures("forced")
def test_a_forced_recipe_that_is_surely_slower_takes_three_rounds(
    findings: Findings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "InterleavedTiming", loaded(0.81, 0.8, 0.82))
    findings.history = searched((PLAIN, 320.0), (FAST[32], 260.0))
    finish(findings, [proven(FAST[32])])
    assert findings.proven is not None
    assert findings.speedup is not None
    assert (findings.speedup.ratio, findings.speedup.rounds) == (pytest.approx(0.81, abs=0.01), 3)


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("islands", [(), ("head",)])
def test_a_forced_recipe_that_cannot_be_confirmed_in_time_is_taken_as_the_search_saw_it(
    findings: Findings, monkeypatch: pytest.MonkeyPatch, islands: tuple[str, ...]
) -> None:
    """One with islands has no trial of the search's own, but was timed with them."""
    monkeypatch.setattr(JOB, "deadline", Deadline(0.0, 1.0, lambda: 2.0))
    findings.history = searched((PLAIN, 320.0), (FAST[32], 400.0))
    recipe = replace(FAST[32], float32_modules=islands)
    finish(findings, [replace(proven(recipe), rate=400.0)])
    assert findings.proven is not None
    assert findings.proven.recipe == recipe
    assert findings.speedup == Ratio(1.25, 1.25, 1.25, 1)
    assert findings.not_covered != []


# The time limit ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("seconds", "rounds"), [(0.5, 0), (1.5, 1), (3.5, 3)])
def test_what_there_was_no_time_to_confirm_is_not_chosen(
    findings: Findings, monkeypatch: pytest.MonkeyPatch, seconds: float, rounds: int
) -> None:
    """A second passes in each round; three tell something, fewer nothing."""
    ticks = iter(range(1, 100))
    monkeypatch.setattr(JOB, "deadline", Deadline(0.0, seconds, lambda: float(next(ticks))))
    finish(findings, [proven(FAST[32])])
    assert findings.choice is not None
    confirmed = rounds >= 3
    assert findings.choice.recipe == (FAST[32] if confirmed else PLAIN)
    assert bool(findings.not_covered) is not confirmed
    assert confirmed or "no time left to confirm" in findings.choice.reason


def test_what_does_not_fit_beside_the_others_is_left_out(
    findings: Findings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three fit; what precision brings is asked first."""
    monkeypatch.setattr(module, "InterleavedTiming", Several)
    monkeypatch.setattr(JOB, "memory_bytes", 350)
    findings.history = tuple(
        replace(o, measurement=replace(o.measurement, peak_memory_bytes=100))
        for o in at(Several)
        if o.measurement is not None
    )
    finish(findings, [proven(KEPT)])
    assert [part.what for part in findings.waterfall] == ["precision", "batch and kept memory"]
