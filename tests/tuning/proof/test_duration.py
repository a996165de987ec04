"""How long a check is expected to take is what it takes, and the search leaves it that time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from factories import ran_at

from autoprec.core.dtypes import Policy
from autoprec.core.numerics.proof_steps import usual_steps
from autoprec.core.recipe import Recipe
from autoprec.core.speed.space import Space
from autoprec.core.speed.trial_results import Outcome
from autoprec.tuning.proof.duration import check_seconds, check_steps, seconds_to_keep_free
from autoprec.tuning.proof.recipe_proof import Proof
from autoprec.tuning.time_limit import PROOF_SHARE, SHORTEST_PROOF_STEPS, Deadline
from tests.tuning.proof.fake_tracer import BFLOAT16, FakeTracer

SPACE = Space(
    (Policy.FLOAT32, Policy.MIXED_BFLOAT16), (8, 16), knobs={"fused_optimizer": (False, True)}
)
FUSED = {"fused_optimizer": True}


def ran(rate: float, recipe: Recipe) -> Outcome:
    return ran_at(SPACE.point(recipe), rate)


@pytest.mark.parametrize("metric", [None, 0.9])
@pytest.mark.parametrize("steps", [8, 30, 60])
def test_what_is_close_to_float32_takes_as_many_steps_as_expected(
    steps: int, metric: float | None
) -> None:
    tracer = FakeTracer(metric=metric)
    assert Proof(tracer, steps=steps).prove(BFLOAT16).accepted
    assert tracer.steps == usual_steps(steps, evaluated=metric is not None)


def test_a_check_counts_its_settings_and_every_call_of_evaluate() -> None:
    assert check_steps(Recipe(batch_size=8), 8, evaluated=True) == 0
    assert check_steps(BFLOAT16, 8, evaluated=False) == SHORTEST_PROOF_STEPS
    settings = check_steps(Recipe(batch_size=8, knobs=FUSED), 8, evaluated=False)
    both = check_steps(replace(BFLOAT16, knobs=FUSED), 8, evaluated=False)
    assert both == settings + SHORTEST_PROOF_STEPS
    evaluated = check_steps(replace(BFLOAT16, knobs=FUSED), 8, evaluated=True)
    other_seed, calls = 16, 9
    assert evaluated == both + other_seed + 5 * calls


def test_the_steps_are_those_of_plain_float32_and_not_of_its_fastest_recipe() -> None:
    plain, fused = Recipe(batch_size=8), Recipe(batch_size=8, knobs=FUSED)
    lower = ran(900, BFLOAT16)
    history = (ran(100, plain), ran(300, fused), lower)
    assert check_seconds(lower, history, SPACE, evaluated=False) == pytest.approx(40 * 8 / 100)
    known = check_seconds(lower, history[1:], SPACE, evaluated=False)
    assert known == pytest.approx(40 * 8 / 300)
    half = check_seconds(lower, history, SPACE, share=0.5, evaluated=False)
    assert half == pytest.approx(20 * 8 / 100)


def test_time_is_kept_free_for_the_check_of_the_fastest_recipe_if_it_has_one() -> None:
    plain, lower = ran(100, Recipe(batch_size=8)), ran(200, replace(BFLOAT16, knobs=FUSED))
    assert seconds_to_keep_free((), SPACE, evaluated=False) == ()
    assert seconds_to_keep_free((plain,), SPACE, evaluated=False) == ()
    slower = ran(90, BFLOAT16)
    assert seconds_to_keep_free((plain, slower), SPACE, evaluated=False) == ()
    whole, short = seconds_to_keep_free((plain, lower), SPACE, evaluated=False)
    assert short == pytest.approx((25 + 40) * 8 / 100)
    assert whole == pytest.approx((25 + 18 + 68) * 8 / 100)


@pytest.mark.parametrize(
    ("check", "share"),
    [
        ((), 0.45),
        ((10.0, 5.0), 0.45),  # there is time for it anyway
        ((45.0, 30.0), PROOF_SHARE - 0.45),
        ((60.0, 40.0), PROOF_SHARE - 0.4),
        ((60.0, 55.0), 0.45),  # not even the shortest ends in time
    ],
)
def test_the_search_ends_early_where_that_lets_a_check_end(
    check: tuple[float, ...], share: float
) -> None:
    assert Deadline(0.0, 100.0).share_before(0.45, check) == pytest.approx(share)
    assert Deadline().share_before(0.45, check) == 0.45
