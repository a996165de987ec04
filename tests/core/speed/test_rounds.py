"""Turns and rounds end when they tell enough, and not before."""

from __future__ import annotations

import math
import random

import pytest

from autoprec.core.ratio import Ratio
from autoprec.core.speed.assumptions import SPEED
from autoprec.core.speed.noise import paired_ratio
from autoprec.core.speed.rounds import (
    level_turns,
    most_rounds,
    rounds_are_enough,
    turns_are_enough,
    turns_worth,
)


def turns(count: int, noise: float, recipes: int = 4, seed: int = 0) -> list[list[float]]:
    """Log step times of recipes that take 1, 2, 3 ... s; all of a turn are slowed alike, too."""
    draw = random.Random(seed)
    slowed = [draw.gauss(0.0, 0.5) for _ in range(count)]
    return [
        [math.log(1 + index) + slow + draw.gauss(0.0, noise) for slow in slowed]
        for index in range(recipes)
    ]


def needed(noise: float, recipes: int = 4, seed: int = 0) -> int:
    """How many turns are enough."""
    drawn = turns(40, noise, recipes, seed)
    return next(n for n in range(1, 41) if turns_are_enough([own[:n] for own in drawn]))


def test_what_slows_all_of_a_turn_counts_neither_as_speed_nor_as_noise() -> None:
    levels, deviation = level_turns(turns(40, 0.02))
    assert [level - levels[0] for level in levels] == pytest.approx(
        [math.log(each) for each in (1, 2, 3, 4)], abs=0.02
    )
    assert 0.01 < deviation < 0.03


def test_what_remains_of_a_turn_is_its_noise() -> None:
    """The second turn was slowed by 1; the third recipe's last turn by 0.5 more than the others."""
    levels, deviation = level_turns([[0.0, 1.0, 0.0], [5.0, 6.0, 5.0], [2.0, 3.0, 2.5]])
    assert levels == [0.0, 5.0, 2.0]
    assert deviation == pytest.approx(math.sqrt((2 * 0.05**2 + 0.5**2) / (2 + 4)))


def test_turns_that_a_recipe_did_not_run_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        level_turns([[0.0, 1.0], [0.0]])


@pytest.mark.parametrize(
    ("process", "turn", "count"), [(8.0, 0.5, 8), (2.0, 2.0, 2), (0.01, 1.0, 1), (100.0, 1.0, 10)]
)
def test_the_dearer_a_process_beside_a_turn_the_more_turns_it_has(
    process: float, turn: float, count: int
) -> None:
    assert turns_worth(process, turn) == count


def test_quiet_turns_are_enough_sooner_than_noisy_ones() -> None:
    counts = [sum(needed(noise, seed=seed) for seed in range(20)) / 20 for noise in (0, 0.03, 0.1)]
    assert counts[0] == 2
    assert counts[0] < counts[1] < 4 < counts[2]


def test_one_turn_or_one_recipe_tells_no_noise() -> None:
    assert not turns_are_enough([[0.0], [1.0]])
    assert not turns_are_enough([[0.0] * 9])
    assert not turns_are_enough([[], []])


def rounds(ratio: float, noise: float, seed: int, *, most: int = 6) -> Ratio:
    """What is known of a ratio when its rounds are enough."""
    draw = random.Random(seed)
    rates: list[float] = []
    while True:
        rates.append(ratio * math.exp(draw.gauss(0.0, noise)))
        found = paired_ratio(rates, [1.0] * len(rates))
        if len(rates) == 2 * most or rounds_are_enough(found, most, early=True):
            return found


@pytest.mark.parametrize("ratio", [1.3, 1.6, 3.0])
def test_a_clear_gain_needs_few_rounds_and_its_interval_holds(ratio: float) -> None:
    found = [rounds(ratio, 0.03, seed) for seed in range(200)]
    assert sum(each.rounds for each in found) / 200 < 4.2
    assert sum(each.low <= ratio <= each.high for each in found) >= 190
    assert all(
        each.high / each.low <= math.exp(SPEED.enough_width) for each in found if ratio < 1.7
    )


@pytest.mark.parametrize("noise", [0.02, 0.05, 0.1])
def test_where_there_is_no_gain_few_find_one(noise: float) -> None:
    found = [rounds(1.0, noise, seed) for seed in range(200)]
    claimed = [each for each in found if each.low > 1.0 and each.ratio > 1.0 + SPEED.min_gain]
    assert len(claimed) <= 10


@pytest.mark.parametrize(
    ("ratio", "early", "late"),
    [
        pytest.param(Ratio(1.3, 1.25, 1.35, 3), True, False, id="narrow beside the gain"),
        pytest.param(Ratio(1.3, 1.20, 1.41, 3), False, False, id="wider than half of the gain"),
        pytest.param(Ratio(1.9, 1.74, 2.07, 3), False, False, id="half of it, and too wide"),
        pytest.param(Ratio(1.0, 0.99, 1.01, 3), True, False, id="surely none"),
        pytest.param(Ratio(1.3, 1.25, 1.35, 2), False, False, id="too few"),
        pytest.param(Ratio(1.3, 1.10, 1.50, 6), True, True, id="surely faster, as asked for"),
        pytest.param(Ratio(1.3, 0.90, 1.50, 6), False, False, id="perhaps faster"),
        pytest.param(Ratio(1.3, 0.98, 1.45, 6), False, False, id="perhaps faster, and narrower"),
        pytest.param(Ratio(1.3, 1.00, 1.45, 6), False, False, id="perhaps as fast"),
        pytest.param(Ratio(1.3, 1.10, 1.50, 7), False, False, id="surely faster, asked too late"),
        pytest.param(Ratio(1.3, 1.25, 1.35, 7), True, True, id="narrow, after more than asked for"),
        pytest.param(Ratio(1.0, 0.95, 1.01, 3), True, False, id="surely none, though not narrow"),
        pytest.param(Ratio(1.0, 0.90, 1.02, 3), False, False, id="perhaps just worth it"),
        pytest.param(Ratio(1.02, 0.95, 1.10, 6), True, True, id="no gain, as asked for"),
        pytest.param(Ratio(1.03, 0.95, 1.10, 6), False, False, id="perhaps a gain"),
    ],
)
def test_when_rounds_are_enough(ratio: Ratio, early: bool, late: bool) -> None:
    assert rounds_are_enough(ratio, 6, early=True) is early
    assert rounds_are_enough(ratio, 6, early=False) is late


def test_what_must_be_taken_and_is_slower_needs_no_more() -> None:
    slower = Ratio(0.8, 0.6, 0.98, 3)
    assert rounds_are_enough(slower, 6, early=False, must_take=True)
    assert not rounds_are_enough(slower, 6, early=False)
    as_fast = Ratio(0.9, 0.8, 1.0, 3)
    assert not rounds_are_enough(as_fast, 6, early=False, must_take=True)


def test_a_confirmation_ends_after_twice_the_rounds_asked_for() -> None:
    assert most_rounds(6) == 12
