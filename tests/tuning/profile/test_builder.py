"""When a compiler is worth it, as a profile says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoprec.core.recipe import Recipe
from autoprec.core.speed.trial_results import Outcome, Status
from autoprec.tuning.profile.builder import _break_even
from tests.tuning.fake_results import BFLOAT16, SPACE, found, result_of, timed


def trial(recipe: Recipe, step: float, warmup: float) -> Outcome:
    return Outcome(SPACE.point(recipe), Status.OK, timed(step, warmup_seconds=warmup))


COMPILED = Recipe(compile=True)


@pytest.mark.parametrize(
    ("recipe", "history", "steps"),
    [
        # 30 s more of warm-up, and 20 ms won with every step of 0.08 s over one of 0.1 s
        (COMPILED, [trial(COMPILED, 0.08, 30.0)], 1500),
        # against the fastest uncompiled recipe, whatever its policy and batch: 0.09 s of 32
        (COMPILED, [trial(COMPILED, 0.08, 31.005), trial(BFLOAT16, 0.09, 1.0)], 3001),
        (COMPILED, [trial(COMPILED, 0.08, 0.5), trial(BFLOAT16, 0.09, 1.0)], 0),
        # no faster than without: never
        (COMPILED, [trial(COMPILED, 0.1, 30.0)], None),
        (COMPILED, [trial(COMPILED, 0.12, 30.0)], None),
        (BFLOAT16, [trial(COMPILED, 0.08, 30.0), trial(BFLOAT16, 0.09, 1.0)], None),
        (replace(COMPILED, batch_size=64), [trial(COMPILED, 0.08, 30.0)], None),
    ],
)
def test_a_compiler_is_worth_it_after_the_steps_that_win_its_seconds_back(
    recipe: Recipe, history: list[Outcome], steps: int | None
) -> None:
    assert _break_even(found(*history), recipe) == steps


def test_what_failed_is_no_rival_of_a_compiler() -> None:
    only = [trial(COMPILED, 0.08, 30.0)]
    assert _break_even(result_of(only), COMPILED) is None
    failed = Outcome(SPACE.point(BFLOAT16), Status.SHORT_DATA, timed())
    assert _break_even(result_of([*only, failed]), COMPILED) is None
