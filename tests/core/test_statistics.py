"""What must hold of the statistics: medians and their intervals."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.core.statistics import median, median_interval, student_interval

times = st.floats(1e-6, 1e3)
series = st.lists(times, min_size=1, max_size=60)


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


@pytest.mark.parametrize(
    ("values", "width"),
    # By hand: the table's 2.776 standard errors at four degrees of freedom, of two values assumed
    # and three seen; 2.228 at ten, which are the most that are counted.
    [
        ([0.0, 0.0, 0.0], 2.776 * math.sqrt(2 * 0.05**2 / 4 / 3)),
        ([-0.1, 0.0, 0.1], 2.776 * math.sqrt((2 * 0.05**2 + 0.02) / 4 / 3)),
        ([0.0] * 12, 2.228 * math.sqrt(2 * 0.05**2 / 10 / 12)),
    ],
)
def test_the_interval_of_a_few_values_counts_what_is_assumed_of_them(values, width):
    assert student_interval(values, 0.05, 2) == pytest.approx(width)
