"""What counts as faster or slower: ratios cover the true one, and disturbed steps are noticed."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.core.codec import DecodeError, from_plain, to_plain
from autoprec.core.ratio import Ratio
from autoprec.core.speed.assumptions import SPEED
from autoprec.core.speed.noise import is_faster, paired_ratio, relative_spread, seems_disturbed
from autoprec.core.statistics import median

times = st.floats(1e-6, 1e3)


@pytest.mark.parametrize(
    ("count", "rank"),
    # Wilcoxon's signed-rank test's 5 % points (two-sided), from any table of it.
    [(6, 0), (7, 2), (8, 3), (9, 5), (10, 8), (12, 13), (15, 25), (20, 52)],
)
def test_as_many_means_of_two_rounds_are_cut_as_the_signed_ranks_allow(count, rank):
    rounds = [2.0 ** (2**index / 2**count) for index in range(count)]
    means = sorted(math.sqrt(a * b) for i, a in enumerate(rounds) for b in rounds[i:])
    ratio = paired_ratio(rounds, [1.0] * count)
    assert (ratio.low, ratio.high) == (means[rank], means[-1 - rank])


@pytest.mark.parametrize(
    ("step", "foreseen", "twice"),
    [
        (1.3, 1.0, True),
        (0.13, 0.1, True),
        (1.1, 1.0, False),  # within what a model errs by
        (1.2, 1.0, False),
        (1.21, 1.0, True),
        (1.64, 1.0, True),
        (1.65, 1.0, False),
        (1.0, 1.3, False),  # faster than foreseen
        (2.0, 1.0, False),  # so slow is the recipe, and no neighbour
        (1.3, None, False),
    ],
)
def test_a_timing_much_slower_than_foreseen_may_be_disturbed(step, foreseen, twice):
    assert seems_disturbed(step, foreseen) is twice


@given(st.lists(st.tuples(times, times), min_size=1, max_size=20))
def test_a_ratio_lies_between_its_rounds_and_inverts(rounds):
    above, below = [a for a, _ in rounds], [b for _, b in rounds]
    ratio = paired_ratio(above, below)
    each = [a / b for a, b in rounds]
    assert 0.999 * min(each) <= ratio.ratio <= 1.001 * max(each)
    assert ratio.low <= ratio.ratio <= ratio.high
    assert len(rounds) < 6 or min(each) <= ratio.low <= ratio.high <= max(each)
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
    alone = paired_ratio(rounds, rounds)
    assert ratio.ratio == pytest.approx(factor)
    assert ratio.low == pytest.approx(factor * alone.low)
    assert ratio.high == pytest.approx(factor * alone.high)


@pytest.mark.parametrize("deviation", [0.02, 0.05, 0.08])
@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_a_few_rounds_cover_the_true_ratio_whatever_their_noise(count, deviation):
    """Rounds in processes of their own, whose ratios differ by what recorded ones did."""
    draw = random.Random(7)
    found = [
        paired_ratio(
            [1.1 * draw.lognormvariate(0.0, deviation) for _ in range(count)], [1.0] * count
        )
        for _ in range(1000)
    ]
    assert sum(ratio.low <= 1.1 <= ratio.high for ratio in found) >= 0.92 * 1000


def test_rounds_that_agree_by_chance_are_not_taken_for_certain():
    width = [paired_ratio([1.1] * count, [1.0] * count) for count in (1, 2, 3, 5)]
    logs = [math.log(ratio.high / ratio.low) for ratio in width]
    assert logs == sorted(logs, reverse=True)
    assert 0.05 < logs[-1] < logs[0] < 0.5


@pytest.mark.parametrize(("above", "below"), [([], []), ([1.0], []), ([1.0], [1.0, 2.0])])
def test_rounds_that_do_not_pair_are_refused(above, below):
    expected = "^a paired ratio needs as many numerators as denominators, at least one$"
    with pytest.raises(ValueError, match=expected):
        paired_ratio(above, below)


@given(st.builds(Ratio, *[st.floats(0, 1e9)] * 3, st.integers(0, 10**6)))
def test_a_ratio_reads_back_as_it_was_written(ratio):
    assert from_plain(Ratio, to_plain(ratio)) == ratio


def test_a_negative_ratio_is_refused():
    with pytest.raises(DecodeError, match=r"low: -1\.0 given, expected a number from 0"):
        from_plain(Ratio, {"ratio": 1, "low": -1, "high": 2, "rounds": 3})


def test_the_spread_of_repeated_values_is_relative_and_zero_where_the_clock_saw_nothing():
    assert relative_spread([2.0, 1.0, 3.0]) == 1.0
    assert relative_spread([]) == 0.0
    assert relative_spread([0.0, 0.0]) == 0.0


@pytest.mark.parametrize(
    ("low", "ratio", "faster"),
    [
        (1.01, 1.03, True),
        (1.0, 1.03, False),
        (1.01, 1.0 + SPEED.min_gain, False),
        (0.9, 1.5, False),
    ],
)
def test_faster_is_what_gains_enough_and_is_beyond_the_noise(low, ratio, faster):
    assert is_faster(Ratio(ratio, low, 2.0, 9)) is faster


@pytest.mark.parametrize(
    ("ratio", "digits", "text"),
    [
        (Ratio(1.84, 1.79, 1.88, 7), 2, "1.84x (1.79-1.88, 7 rounds)"),
        (Ratio(1.84, 1.79, 1.88, 0), 2, "1.84x (1.79-1.88)"),
        (Ratio(1.84, 1.84, 1.84, 1), 2, "1.84x (1 round)"),
        (Ratio(1.0, 1.0, 1.0, 0), 2, "1.00x"),
        (Ratio(1.0142, 1.0064, 1.0225, 0), 4, "1.0142x (1.0064-1.0225)"),
        (Ratio(0.0417, 0.0402, 0.12, 6), 2, "0.042x (0.04-0.12, 6 rounds)"),
    ],
)
def test_a_ratio_is_shown_with_what_is_known_of_its_interval(ratio, digits, text):
    assert ratio.in_words(digits) == text


def test_every_number_of_a_ratio_can_be_marked_up():
    marked = Ratio(1.84, 1.79, 1.88, 7).in_words(show=lambda value, text: f"<{value}|{text}>")
    assert marked == "<1.84|1.84x> (<1.79|1.79>-<1.88|1.88>, <7|7> rounds)"


def test_a_share_has_its_interval_in_per_cent():
    share = Ratio(0.21, 0.184, 0.25, 8)
    assert share.as_share() == "21% (18-25)"
    marked = share.as_share(lambda value, text: f"<{value}|{text}>")
    assert marked == "<0.21|21%> (<0.184|18>-<0.25|25>)"
