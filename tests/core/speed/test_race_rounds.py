"""A race goes on while a round may bring more than it costs."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from autoprec.core.speed.assumptions import SPEED
from autoprec.core.speed.rounds import find_leader, select_contenders, who_runs_on


def race(true: Sequence[float], noise: float, turn: float, seed: int) -> tuple[int, list[int]]:
    """Who won, and how many rounds each one ran."""
    draw = random.Random(seed)
    rates: list[list[float]] = [[] for _ in true]
    running: Sequence[int] = range(len(true))
    while running and len(rates[running[0]]) < 200:
        for index in running:
            rates[index].append(true[index] * (1 + draw.gauss(0.0, noise)))
        running = select_contenders(rates, turn)
    return find_leader(rates), [len(own) for own in rates]


def test_nobody_is_out_before_three_rounds() -> None:
    assert select_contenders([[1.0], [9.0]], 1.0) == (0, 1)
    assert select_contenders([[1.0, 1.0], [9.0, 9.0]], 1.0) == (0, 1)
    assert select_contenders([[1.0] * SPEED.min_rounds, [9.0] * SPEED.min_rounds], 1.0) == ()


def test_who_is_surely_behind_is_out_and_the_others_go_on() -> None:
    rates = [[100.0, 104.0, 97.0], [101.0, 98.0, 103.0], [50.0, 52.0, 49.0]]
    assert select_contenders(rates, 0.25) == (0, 1)


def test_who_is_out_stays_out() -> None:
    rates = [[100.0, 104.0, 97.0, 102.0], [101.0, 98.0, 103.0, 99.0], [99.0, 103.0, 101.0]]
    assert select_contenders(rates, 0.25) == (0, 1)
    assert find_leader(rates) == 0


def test_alone_nobody_runs() -> None:
    assert select_contenders([[1.0, 1.0, 1.0]], 1.0) == ()
    assert select_contenders([[1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0]], 1.0) == ()


def test_turns_that_take_long_are_spent_on_less_doubt() -> None:
    rates = [[100.0, 104.0, 97.0], [98.0, 99.0, 100.0]]
    assert select_contenders(rates, 0.25) == (0, 1)
    assert select_contenders(rates, 60.0) == ()


def test_nobody_is_out_before_three_rounds_and_a_race_of_one_ends_there():
    assert who_runs_on([[1.0], [9.0]], 4.0) == (0, 1)
    assert who_runs_on([[9.0] * (SPEED.min_rounds - 1)], 4.0) == (0,)
    assert who_runs_on([[9.0] * SPEED.min_rounds], 4.0) == ()


def test_a_round_that_takes_longer_is_spent_on_less():
    rates = [[100.0, 106.0, 95.0], [98.0, 99.0, 101.0]]
    assert who_runs_on(rates, 1.0) == (0, 1)
    assert who_runs_on(rates, 60.0) == ()


@pytest.mark.parametrize(("recipes", "goes_on", "ends"), [(2, 3.3, 3.4), (3, 3.4, 3.5)])
def test_equal_recipes_run_on_while_a_turn_takes_no_longer(
    recipes: int, goes_on: float, ends: float
) -> None:
    """Three rounds without noise leave 2.9 % of doubt about two, and 2.2 % about three."""
    rates = [[100.0] * 3] * recipes
    assert select_contenders(rates, goes_on) == tuple(range(recipes))
    assert select_contenders(rates, ends) == ()
    assert who_runs_on(rates, 2 * goes_on) == tuple(range(recipes))
    assert who_runs_on(rates, 2 * ends) == ()


def test_who_ran_every_round_alone_leads() -> None:
    assert find_leader([[1.0, 1.0]]) == 0
    assert find_leader([[9.0], [1.0, 1.0]]) == 1


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.10])
def test_what_is_lost_to_noise_is_less_than_a_hundredth(noise: float) -> None:
    """Against the fastest by a tenth; where three rounds decide, noise of a tenth loses two."""
    true = (1.0, 1.1, 1.0)
    lost = [1.0 - true[race(true, noise, 0.25, seed)[0]] / 1.1 for seed in range(100)]
    assert sum(lost) / len(lost) < 0.01


def test_noise_is_met_with_rounds() -> None:
    def rounds(noise: float) -> float:
        return sum(max(race([1.0, 1.02], noise, 0.25, seed)[1]) for seed in range(100)) / 100

    assert rounds(0.005) < 4 < rounds(0.05)
