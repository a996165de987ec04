"""How many steps a trial times: warm-up is dropped, and every timing ends."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autoprec.core.speed.timing_budget import (
    Summary,
    TimingBudget,
    summarize,
    timing_may_stop,
    warmup_length,
)

times = st.floats(1e-6, 1e3)
series = st.lists(times, min_size=1, max_size=60)


budgets = st.builds(
    TimingBudget,
    seconds=st.floats(0.01, 10),
    min_steps=st.integers(1, 10),
    max_steps=st.integers(10, 60),
    precision=st.floats(0.001, 0.5),
    too_slow_seconds=st.none() | times,
)


@given(series)
def test_at_least_half_of_the_steps_are_kept(values):
    summary = summarize(values)
    assert summary.warmup == warmup_length(values) <= len(values) / 2
    assert summary.steps + summary.warmup == len(values)
    assert summary.low <= summary.median <= summary.high
    assert summary.spread >= 0


@given(st.integers(0, 6), times)
def test_slow_first_steps_are_dropped_and_no_others(slow, step):
    steady = [step * factor for factor in (1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01, 0.99)]
    assert warmup_length([5 * step] * slow + steady) == slow


def test_noise_alone_is_no_warmup():
    assert warmup_length([1.3, 0.8, 1.2, 0.7, 1.25, 0.75, 1.1, 0.9]) == 0


def steps_until(budget, time_of):
    """Count the steps a timing takes whose i-th step takes `time_of(i)` seconds."""
    taken = []
    while not timing_may_stop(taken, budget, sum(taken)):
        taken.append(time_of(len(taken)))
        assert len(taken) <= max(budget.max_steps, budget.min_steps)
    return len(taken)


@given(budgets, st.integers(0, 2**32))
def test_every_timing_ends_within_its_steps(budget, seed):
    draw = random.Random(seed)
    assert steps_until(budget, lambda _: draw.lognormvariate(-6, 1.0)) >= 1


@given(budgets, times)
def test_a_timing_stays_stopped_however_many_equal_steps_follow(budget, step):
    count = steps_until(budget, lambda _: step)
    assert all(timing_may_stop([step] * n, budget, step * n) for n in range(count, count + 30))


@given(series, budgets, st.floats(0, 20), st.floats(1, 4))
def test_a_looser_budget_never_lengthens_the_stop(values, budget, elapsed, factor):
    assume(timing_may_stop(values, budget, elapsed))
    looser = TimingBudget(
        seconds=budget.seconds / factor,
        min_steps=budget.min_steps,
        max_steps=math.ceil(budget.max_steps / factor),
        precision=budget.precision * factor,
        too_slow_seconds=budget.too_slow_seconds and budget.too_slow_seconds / factor,
    )
    assert timing_may_stop(values, looser, elapsed)


@given(series, budgets, st.floats(0, 20), st.floats(0, 20))
def test_more_time_never_undoes_a_stop(values, budget, elapsed, more):
    assume(timing_may_stop(values, budget, elapsed))
    assert timing_may_stop(values, budget, elapsed + more)


def test_a_steady_timing_stops_as_soon_as_an_interval_can_be_given():
    assert steps_until(TimingBudget(seconds=100), lambda _: 0.001) == 6


def test_a_hopeless_timing_stops_at_its_second_step():
    budget = TimingBudget(too_slow_seconds=0.1)
    assert not timing_may_stop([0.5], budget, 0.5)
    assert timing_may_stop([0.5, 0.3], budget, 0.8)
    assert not timing_may_stop([0.5, 0.15], budget, 0.65)


def test_too_few_steps_stop_only_at_four_times_the_time():
    budget = TimingBudget(seconds=1.0, min_steps=5)
    assert not timing_may_stop([], budget, 100.0)
    assert not timing_may_stop([9.0], budget, 9.0)
    assert timing_may_stop([2.0, 2.0], budget, 4.0)
    assert not timing_may_stop([1.9, 1.9], budget, 3.8)


def test_the_spread_is_relative_and_zero_where_the_clock_saw_nothing():
    assert Summary(2.0, 1.5, 2.5, 9).spread == 0.5
    assert Summary(0.0, 0.0, 0.0, 9).spread == 0.0


def test_of_no_steps_there_is_no_summary():
    with pytest.raises(ValueError, match="nothing"):
        summarize([])
