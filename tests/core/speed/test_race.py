"""Which recipes race, who runs on, and what the rounds tell of those that did not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autoprec.core.measurement import Measurement
from autoprec.core.recipe import Recipe
from autoprec.core.speed.assumptions import SPEED
from autoprec.core.speed.race import find_contenders, known_finalist, ranking
from autoprec.core.speed.selection import Finalist
from autoprec.core.speed.space import BATCH
from autoprec.core.speed.trial_results import Outcome, Status, possibly_disturbed
from tests.core.speed.machines import BASELINE


def ran(batch: int, rate: float, step: float = 0.01, setup: float = 0.5) -> Outcome:
    measured = Measurement(step, step, step, 8, rate * step, warmup_seconds=setup)
    return Outcome({**BASELINE, "policy": "mixed_bfloat16", BATCH: batch}, Status.OK, measured)


def racing(
    *history: Outcome, new_processes: bool = True, share: float = SPEED.most_share
) -> list[float]:
    found = find_contenders(
        history, lambda outcome: True, new_processes=new_processes, batch_share=share
    )
    return [outcome.rate for outcome in found]


def test_the_fastest_races_alone_where_the_rest_is_far_behind():
    assert racing(ran(8, 100.0), ran(16, 60.0)) == [100.0]
    assert racing() == []


def test_what_may_be_the_fastest_races_fastest_first():
    assert racing(ran(8, 95.0), ran(16, 100.0), ran(32, 99.0)) == [100.0, 99.0, 95.0]


def test_the_smallest_batch_that_may_be_the_fastest_is_to_be_beaten_where_the_knee_is_wanted():
    history = ran(64, 96.0), ran(128, 94.0), ran(1024, 100.0), ran(4096, 99.0)
    assert racing(*history) == [100.0, 99.0, 96.0, 94.0]
    assert racing(*history, share=SPEED.knee_share) == [96.0, 100.0, 99.0, 94.0]
    assert racing(ran(64, 94.0), *history[2:], share=SPEED.knee_share) == [100.0, 99.0, 94.0]


def test_a_larger_batch_must_promise_more_than_a_smaller_one_may_lose():
    slower = [ran(batch, 90.0, step=1.0) for batch in (128, 256, 512)]
    assert racing(ran(64, 100.0), *slower) == [100.0, 90.0, 90.0, 90.0]
    assert racing(ran(64, 100.0), *slower, share=SPEED.knee_share) == [100.0]
    assert racing(ran(1024, 100.0), *slower, share=SPEED.knee_share) == [100.0, 90.0, 90.0, 90.0]


def test_at_the_same_batch_no_more_is_asked_than_at_a_smaller_one():
    slower = ran(64, 90.0, step=1.0)
    slower = replace(slower, point={**slower.point, "policy": "float32"})
    assert racing(ran(64, 100.0), slower, share=SPEED.knee_share) == [100.0, 90.0]


def test_recipes_of_less_than_a_sample_a_second_race():
    assert racing(ran(8, 0.5), ran(16, 0.49)) == [0.5, 0.49]


def test_only_what_is_allowed_and_ran_races():
    gone = replace(ran(64, 100.0), status=Status.CRASHED, measurement=None)
    found = find_contenders(
        [ran(8, 100.0), ran(16, 99.0), gone], lambda o: o.rate < 100.0, new_processes=True
    )
    assert [outcome.rate for outcome in found] == [99.0]


@pytest.mark.parametrize(
    ("setup", "step", "new_processes", "races"),
    [
        (0.5, 0.01, True, True),
        (40.0, 0.01, True, False),  # opened three times
        (40.0, 0.01, False, True),  # opened once
        (0.5, 40.0, True, False),  # three rounds of a step
    ],
)
def test_a_recipe_races_where_its_gain_is_worth_its_seconds(setup, step, new_processes, races):
    close = ran(8, 97.0, step, setup)
    found = racing(ran(16, 100.0, step, setup), close, new_processes=new_processes)
    assert (97.0 in found) is races


def test_no_more_than_five_race():
    assert racing(*(ran(2**n, 100.0 - n) for n in range(3, 11))) == [97.0, 96.0, 95.0, 94.0, 93.0]


def test_one_that_was_slower_than_all_others_predict_runs_along():
    dear = ran(128, 900.0, setup=20.0)  # by the others' rates it is a third faster than the best
    assert racing(ran(16, 400.0), ran(32, 700.0), ran(64, 1000.0), dear) == [1000.0, 900.0]
    alone = find_contenders(
        [ran(32, 700.0), ran(64, 1000.0), dear], lambda o: o.rate == 1000.0, new_processes=True
    )
    assert [outcome.rate for outcome in alone] == [1000.0]


def finals(*rates: tuple[float, ...]) -> list[Finalist]:
    return [Finalist(Recipe(batch_size=2**n), own) for n, own in enumerate(rates)]


def test_of_two_that_may_have_been_slowed_the_more_promising_runs_along():
    """Two policies as fast as float32; either's largest batch was slowed, and starts in 90 s."""
    history, slow = [], {("mixed_bfloat16", 128): 0.8, ("mixed_float16", 256): 0.8}
    for policy in ("float32", "mixed_bfloat16", "mixed_float16"):
        for batch in (8, 16, 32, 64, 128, 256):
            factor = slow.get((policy, batch), 1.0)
            one = ran(batch, factor * 1000 * batch / (batch + 8), setup=90.0 * (factor < 1.0))
            history.append(replace(one, point={**one.point, "policy": policy}))
    slowed = possibly_disturbed(history)
    assert [outcome.point["policy"] for outcome in slowed] == ["mixed_float16", "mixed_bfloat16"]
    found = find_contenders(history, lambda outcome: True, new_processes=True)
    assert found[-1] is slowed[0]
    assert slowed[1] not in found


def test_what_raced_compares_with_what_did_not_as_in_the_search():
    """The baseline had been slowed; the contenders' mean is the search's."""
    plain, one, two, rest = ran(4, 25.0), ran(8, 110.0), ran(16, 100.0), ran(32, 80.0)
    finalists = finals((40.0,) * 3, (80.0,) * 3, (88.0,) * 3)
    found = ranking([plain, one, two, rest], plain, [one, two], finalists)
    rates = [outcome.rate for outcome in found]
    assert rates[1] * rates[2] == pytest.approx(110.0 * 100.0)
    assert rates[2] / rates[1] == pytest.approx(1.1)
    assert rates[0] / rates[1] == pytest.approx(0.5)
    assert found[3] == rest


def test_who_was_out_early_is_compared_over_the_rounds_that_it_ran():
    plain, one, two = ran(4, 25.0), ran(8, 110.0), ran(16, 100.0)
    rates = ((20.0, 40.0, 40.0, 40.0), (40.0, 80.0, 80.0, 80.0), (20.0, 40.0, 40.0))
    found = ranking([plain, one, two], plain, [one, two], finals(*rates))
    assert math.isclose(found[1].rate / found[2].rate, 2.0)


def test_the_leader_is_what_rounds_are_compared_with():
    """The first contender ran at a quarter, half and all of the leader's speed: at half of it."""
    plain, one, two = ran(4, 25.0), ran(8, 110.0), ran(16, 100.0)
    rates = ((50.0, 6.25, 50.0), (25.0, 50.0, 100.0), (100.0, 100.0, 100.0))
    found = ranking([plain, one, two], plain, [one, two], finals(*rates))
    assert found[2].rate / found[1].rate == pytest.approx(2.0)
    assert found[0].rate / found[2].rate == pytest.approx(2**-1.75)


WINNER = Recipe(batch_size=64, compile=True)
PLAIN = replace(WINNER, compile=False)


def at(batch: int, recipe: Recipe, *rates: float) -> Finalist:
    return Finalist(replace(recipe, batch_size=batch), rates)


def test_what_raced_is_known_by_its_own_rounds():
    own, plain = at(64, WINNER, 120.0, 130.0), at(64, PLAIN, 100.0, 90.0)
    others = at(128, WINNER, 200.0), at(128, PLAIN, 10.0)
    assert known_finalist(PLAIN, WINNER, [own, plain, *others]) == plain
    assert known_finalist(WINNER, WINNER, [own, plain, *others]) == own


@pytest.mark.parametrize("batch", [128, 32])
def test_what_a_setting_costs_at_twice_or_half_the_batch_stands_for_its_cost(batch: int):
    own = replace(at(64, WINNER, 120.0, 130.0, 110.0), loader_feeds=500.0)
    pair = at(batch, WINNER, 200.0, 100.0), at(batch, PLAIN, 100.0, 25.0)
    found = known_finalist(PLAIN, WINNER, [own, *pair])
    assert found == Finalist(PLAIN, (60.0, 32.5), 500.0)


def test_twice_the_batch_tells_before_half_of_it():
    own = at(64, WINNER, 120.0)
    half = at(32, WINNER, 100.0), at(32, PLAIN, 100.0)
    twice = at(128, WINNER, 200.0), at(128, PLAIN, 100.0)
    assert known_finalist(PLAIN, WINNER, [own, *half, *twice]) == at(64, PLAIN, 60.0)


@pytest.mark.parametrize(
    "finalists",
    [
        pytest.param([], id="nothing raced"),
        pytest.param([at(64, WINNER, 1.0)], id="the winner alone"),
        pytest.param([at(128, WINNER, 1.0), at(128, PLAIN, 1.0)], id="not the winner"),
        pytest.param([at(64, WINNER, 1.0), at(128, PLAIN, 1.0)], id="one of the pair"),
        pytest.param([at(64, WINNER, 1.0), at(128, WINNER, 1.0)], id="the other of the pair"),
        pytest.param(
            [at(64, WINNER, 1.0), at(256, WINNER, 1.0), at(256, PLAIN, 1.0)], id="four times"
        ),
        pytest.param([at(64, WINNER, 1.0), at(21, WINNER, 1.0), at(21, PLAIN, 1.0)], id="a third"),
    ],
)
def test_what_did_not_race_in_any_way_is_not_known(finalists: list[Finalist]):
    assert known_finalist(PLAIN, WINNER, finalists) is None


def test_a_recipe_of_another_batch_is_known_by_its_own_rounds_only():
    own, pair = at(64, WINNER, 1.0), [at(128, WINNER, 1.0), at(128, PLAIN, 1.0)]
    assert known_finalist(replace(PLAIN, batch_size=32), WINNER, [own, *pair]) is None


def test_the_batch_of_one_sample_has_no_half():
    one = replace(WINNER, batch_size=1)
    assert known_finalist(replace(PLAIN, batch_size=1), one, [at(1, WINNER, 1.0)]) is None
