"""Which recipes race, who runs on, and what the rounds tell of those that did not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from autoprec.core.measurement import Measurement
from autoprec.core.recipe import Recipe
from autoprec.core.speed.assumptions import SPEED
from autoprec.core.speed.race import find_contenders, ranking
from autoprec.core.speed.rounds import who_runs_on
from autoprec.core.speed.selection import Finalist
from autoprec.core.speed.space import BATCH
from autoprec.core.speed.trial_results import Outcome, Status
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


def test_nobody_is_out_before_three_rounds_and_a_race_of_one_ends_there():
    assert who_runs_on([[1.0], [9.0]], 4.0) == (0, 1)
    assert who_runs_on([[9.0] * (SPEED.min_rounds - 1)], 4.0) == (0,)
    assert who_runs_on([[9.0] * SPEED.min_rounds], 4.0) == ()


def test_a_round_that_takes_longer_is_spent_on_less():
    rates = [[100.0, 106.0, 95.0], [98.0, 99.0, 101.0]]
    assert who_runs_on(rates, 1.0) == (0, 1)
    assert who_runs_on(rates, 60.0) == ()


def finals(*rates: tuple[float, ...]) -> list[Finalist]:
    return [Finalist(Recipe(batch_size=2**n), own) for n, own in enumerate(rates)]


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
