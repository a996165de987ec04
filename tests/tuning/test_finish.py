"""The finish when a finalist fails that ran before: something smaller takes its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from autoprec.core.choice import Finalist
from autoprec.core.device import DeviceKind
from autoprec.core.dtypes import Policy
from autoprec.core.measurement import Measurement, TaskFacts
from autoprec.core.outcomes import Outcome, Status
from autoprec.core.recipe import KEEP_MEMORY, Recipe
from autoprec.core.space import Space
from autoprec.errors import TaskError
from autoprec.tuning import contest as module
from autoprec.tuning.contest import FinalistFailed, StillRunning, everybody
from autoprec.tuning.events import silent
from autoprec.tuning.evidence import REFERENCE, Findings, Proven
from autoprec.tuning.failures import FailureKind, WorkerFailure
from autoprec.tuning.finish import Finish
from tests.core.test_rules import facts as device

SPACE = Space(
    policies=(Policy.MIXED_BFLOAT16, Policy.FLOAT32),
    batch_sizes=(16, 32, 64),
    knobs={KEEP_MEMORY: (False, True)},
)
PLAIN = Recipe(batch_size=32)
FAST = {size: Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=size) for size in (32, 64)}
RUNNER = SimpleNamespace(drop=lambda: None)
WORK = cast(
    Any,
    SimpleNamespace(
        options=SimpleNamespace(rounds=5, seed=0),
        listener=silent,
        memory_bytes=None,
        float32_allowed=True,
        runner=None,
        watch=None,
        on_cpu=True,
    ),
)


def proven(recipe: Recipe) -> Proven:
    return Proven(recipe, REFERENCE, rate=10.0 * recipe.batch_size, step_seconds=0.1)


class Stage:
    """A contest in which some recipes fail; everybody's rate goes with the batch and policy."""

    failing: tuple[str, ...] = ()

    def __init__(self, recipes: Sequence[Recipe], *_: object, **__: object) -> None:
        self.recipes = recipes
        self.measured = [[Measurement(0.1, 0.1, 0.1, 5, self.rate(r) / 10)] for r in recipes]

    @staticmethod
    def rate(recipe: Recipe) -> float:
        return recipe.batch_size * (2.0 if recipe.policy.mixed else 1.0)

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None: ...

    def run(self, rounds: int, running: StillRunning = everybody) -> tuple[Finalist, ...]:
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
    proven: Sequence[Proven],
    substitute: Callable[[Recipe], Proven | None] = lambda failed: None,
    *,
    memory_pays: bool = True,
) -> None:
    last = Finish(
        WORK, cast(Any, RUNNER), PLAIN, findings, cast(Any, None), lambda batch: memory_pays
    )
    last.run(proven, substitute)


@pytest.fixture
def findings(monkeypatch: pytest.MonkeyPatch) -> Findings:
    monkeypatch.setattr(module, "Contest", Stage)
    monkeypatch.setattr(Stage, "failing", ())
    outcomes = tuple(
        Outcome(point, Status.OK, Measurement(0.1, 0.1, 0.1, 5, 1.0)) for point in SPACE.points()
    )
    return Findings(device(DeviceKind.CPU), TaskFacts("torch", {}, 32, 32, 1000), outcomes, SPACE)


def test_a_smaller_batch_takes_the_place_of_one_that_fails(
    findings: Findings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stage, "failing", (FAST[64].key(),))
    asked = []

    def substitute(failed: Recipe) -> Proven:
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
    compiled = replace(PLAIN, batch_size=64, compile=True)
    finish(findings, [proven(compiled)])
    assert findings.speedup is not None
    assert findings.speedup.ratio == pytest.approx(2.0)
    assert findings.speedup_same_batch is not None
    assert findings.speedup_same_batch.ratio == pytest.approx(1.0)


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
    monkeypatch.setattr(module, "Contest", Disturbed)
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

    monkeypatch.setattr(module, "Contest", Fading)
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

    def run(self: Stage, rounds: int, running: StillRunning) -> tuple[Finalist, ...]:
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
    monkeypatch.setattr(module, "Contest", Keeping)
    monkeypatch.setattr(Keeping, "gain", gain)
    finish(findings, [proven(KEPT)], memory_pays=False)
    assert findings.proven is not None
    assert findings.proven.recipe.keeps_memory is kept
    assert findings.speedup is not None
    assert findings.speedup.ratio == pytest.approx(4.0 * (gain if kept else 1.0))


def test_where_the_baseline_left_no_doubt_the_winner_is_not_run_without_it(
    findings: Findings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "Contest", Keeping)
    finish(findings, [proven(KEPT)])
    assert findings.proven is not None
    assert findings.proven.recipe == KEPT
    assert FAST[64].key() not in findings.finals


@pytest.mark.parametrize("size", [64, 32])
def test_a_comparison_that_would_take_long_is_left_out(findings: Findings, size: int) -> None:
    """Known from its own trial, or else from the baseline's."""
    slow = Measurement(0.8 * size / 32, 0.1, 0.1, 5, 1.0)
    findings.history = tuple(
        replace(o, measurement=slow)
        for o in findings.history
        if (o.point["policy"], o.point["batch_size"]) == ("float32", size)
    )
    finish(findings, [proven(FAST[64])])
    assert findings.speedup is not None
    assert findings.speedup_same_batch is None
