"""What must hold of the statistics: intervals cover, warm-up is dropped, every timing ends."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from autoprec.core.codec import DecodeError, from_plain, to_plain
from autoprec.core.measurement import TimingBudget
from autoprec.core.statistics import (
    Ratio,
    Summary,
    median,
    median_interval,
    paired_ratio,
    relative_spread,
    seems_disturbed,
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
def test_half_of_the_values_lie_on_either_side_of_the_median(values):
    middle = median(values)
    assert sum(v <= middle for v in values) >= len(values) / 2
    assert sum(v >= middle for v in values) >= len(values) / 2


@given(series, st.floats(0.5, 0.999))
def test_the_interval_contains_the_median_and_stays_within_the_values(values, confidence):
    low, high = median_interval(values, confidence)
    assert min(values) <= low <= median(values) <= high <= max(values)


@given(series, st.floats(0.5, 0.99), st.floats(0.5, 0.99))
def test_more_confidence_never_narrows_the_interval(values, one, other):
    low, high = median_interval(values, min(one, other))
    wider_low, wider_high = median_interval(values, max(one, other))
    assert wider_low <= low <= high <= wider_high


@given(series, st.randoms())
def test_order_does_not_matter_to_the_median(values, shuffler):
    mixed = list(values)
    shuffler.shuffle(mixed)
    assert median(mixed) == median(values)
    assert median_interval(mixed) == median_interval(values)


@pytest.mark.parametrize(
    ("count", "rank"),
    # The sign test's 5 % points (two-sided), from any table of it: of 20 values 5 are cut, ...
    [(1, 0), (5, 0), (6, 0), (8, 0), (9, 1), (12, 2), (20, 5), (50, 17), (100, 39)],
)
def test_as_many_values_are_cut_as_the_sign_test_allows(count, rank):
    assert median_interval(list(range(count))) == (rank, count - 1 - rank)


@pytest.mark.parametrize(
    ("count", "rank"),
    # Wilcoxon's signed-rank test's 5 % points (two-sided), from any table of it.
    [(1, 0), (5, 0), (6, 0), (7, 2), (8, 3), (9, 5), (10, 8), (12, 13), (15, 25), (20, 52)],
)
def test_as_many_means_of_two_rounds_are_cut_as_the_signed_ranks_allow(count, rank):
    rounds = [2.0 ** (2**index / 2**count) for index in range(count)]
    means = sorted(math.sqrt(a * b) for i, a in enumerate(rounds) for b in rounds[i:])
    ratio = paired_ratio(rounds, [1.0] * count)
    assert (ratio.low, ratio.high) == (means[rank], means[-1 - rank])


@pytest.mark.parametrize("count", [1_100, 5_000])
def test_the_interval_holds_for_more_values_than_a_float_can_count(count):
    low, high = median_interval(list(range(count)))
    assert (high - low) / 2 == pytest.approx(0.98 * math.sqrt(count), rel=0.1)
    assert low + high == count - 1


def test_the_interval_covers_the_true_median_as_often_as_it_says():
    draw = random.Random(7)
    hits = 0
    for _ in range(400):
        low, high = median_interval([draw.lognormvariate(0.0, 1.0) for _ in range(15)])
        hits += low <= 1.0 <= high
    assert hits >= 0.93 * 400


def test_of_nothing_there_is_no_median_and_no_interval():
    with pytest.raises(ValueError, match="median of nothing"):
        median([])
    with pytest.raises(ValueError, match="interval of nothing"):
        median_interval([])
    with pytest.raises(ValueError, match="nothing"):
        summarize([])


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


def test_the_spread_is_relative_and_zero_where_the_clock_saw_nothing():
    assert Summary(2.0, 1.5, 2.5, 9).spread == 0.5
    assert Summary(0.0, 0.0, 0.0, 9).spread == 0.0
    assert relative_spread([2.0, 1.0, 3.0]) == 1.0
    assert relative_spread([]) == 0.0
    assert relative_spread([0.0, 0.0]) == 0.0


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


@pytest.mark.parametrize(
    ("step", "foreseen", "twice"),
    [
        (1.3, 1.0, True),
        (0.13, 0.1, True),
        (1.1, 1.0, False),  # within what a model errs by
        (1.0, 1.3, False),  # faster than foreseen
        (2.0, 1.0, False),  # so slow is the recipe, and no neighbour
        (1.3, None, False),
    ],
)
def test_a_timing_much_slower_than_foreseen_may_be_disturbed(step, foreseen, twice):
    assert seems_disturbed(step, foreseen) is twice


def test_too_few_steps_stop_only_at_four_times_the_time():
    budget = TimingBudget(seconds=1.0, min_steps=5)
    assert not timing_may_stop([], budget, 100.0)
    assert not timing_may_stop([9.0], budget, 9.0)
    assert timing_may_stop([2.0, 2.0], budget, 4.0)
    assert not timing_may_stop([1.9, 1.9], budget, 3.8)


@given(st.lists(st.tuples(times, times), min_size=1, max_size=20))
def test_a_ratio_lies_between_its_rounds_and_inverts(rounds):
    above, below = [a for a, _ in rounds], [b for _, b in rounds]
    ratio = paired_ratio(above, below)
    each = [a / b for a, b in rounds]
    assert min(each) <= ratio.low <= ratio.ratio <= ratio.high <= max(each)
    assert ratio.rounds == len(rounds)
    inverse = paired_ratio(below, above)
    assert inverse.low == pytest.approx(1 / ratio.high)
    assert inverse.high == pytest.approx(1 / ratio.low)


def rounds_of(draw, count, ratio, disturbed):
    """Two recipes' rates: noise of their own, drift that they share, now and then a disturbance."""

    def rate(level):
        return level * draw.lognormvariate(0.0, 0.05) * (0.75 if draw.random() < disturbed else 1.0)

    drift = [draw.lognormvariate(0.0, 0.3) for _ in range(count)]
    return [ratio * rate(level) for level in drift], [rate(level) for level in drift]


@pytest.mark.parametrize("disturbed", [0.0, 0.2])
@pytest.mark.parametrize("count", [9, 18])
def test_a_ratio_covers_the_true_one_as_often_as_it_says(count, disturbed):
    draw = random.Random(7)
    found = [paired_ratio(*rounds_of(draw, count, 1.1, disturbed)) for _ in range(400)]
    assert sum(ratio.low <= 1.1 <= ratio.high for ratio in found) >= 0.93 * 400


@pytest.mark.parametrize("count", [5, 9, 18])
def test_a_ratio_is_nearer_to_the_true_one_than_the_median_of_the_rounds(count):
    """By the mean square of the errors' logarithms; a few disturbed rounds do not change that."""
    draw = random.Random(7)
    errors, of_medians = [], []
    for _ in range(400):
        above, below = rounds_of(draw, count, 1.1, disturbed=0.03)
        errors.append(math.log(paired_ratio(above, below).ratio / 1.1))
        of_medians.append(
            math.log(median([a / b for a, b in zip(above, below, strict=True)]) / 1.1)
        )
    assert sum(e**2 for e in errors) < sum(e**2 for e in of_medians)


@given(times, st.lists(times, min_size=1, max_size=20))
def test_drift_that_both_share_leaves_a_paired_ratio_as_it_was(factor, rounds):
    ratio = paired_ratio([factor * each for each in rounds], rounds)
    assert ratio.low == pytest.approx(factor)
    assert ratio.high == pytest.approx(factor)


@pytest.mark.parametrize(("above", "below"), [([], []), ([1.0], []), ([1.0], [1.0, 2.0])])
def test_rounds_that_do_not_pair_are_refused(above, below):
    with pytest.raises(ValueError, match="as many numerators as denominators"):
        paired_ratio(above, below)


@given(st.builds(Ratio, *[st.floats(0, 1e9)] * 3, st.integers(0, 10**6)))
def test_a_ratio_reads_back_as_it_was_written(ratio):
    assert from_plain(Ratio, to_plain(ratio)) == ratio


def test_a_negative_ratio_is_refused():
    with pytest.raises(DecodeError, match=r"low: -1\.0 given, expected a number from 0"):
        from_plain(Ratio, {"ratio": 1, "low": -1, "high": 2, "rounds": 3})
