"""Exponents of backward passes are counted over batches, and their gradients by their norm."""

from __future__ import annotations

import math

import pytest

from autoprec.backends.shared.gradient_exponents import (
    ExponentCounts,
    exponent_of,
    largest_exponent,
    least_float16_exponent,
    relative_error,
    weighted_shares,
)


def test_exponents_are_those_of_binary_numbers():
    assert [exponent_of(value) for value in (1.0, 0.75, 2.0**-30, 7.0)] == [0, -1, -30, 2]
    assert largest_exponent([0.5, 6.0, math.inf, 0.0]) == 2
    assert largest_exponent([0.0, math.nan]) is None


def test_a_gradient_counts_by_its_share_of_the_norm():
    shares = weighted_shares(
        [(3.0, {0: 1, 1: 2}), (1.0, {1: 4}), (0.0, {9: 1}), (math.inf, {9: 1})]
    )
    assert shares == pytest.approx({0: 0.25, 1: 0.75})
    assert weighted_shares([]) == {}


def test_a_histogram_gathers_several_batches():
    counts = ExponentCounts()
    counts.add([4.0, 0.5], {-1: 0.5, 2: 0.5})
    counts.add([16.0], {2: 1.0})
    found = counts.histogram()
    assert (found.largest, found.smallest, found.batches, found.finite) == (4, -1, 2, True)
    assert found.counts == {"-1": 0.25, "2": 0.75}
    counts.add([math.inf], {})
    assert not counts.histogram().finite
    assert counts.histogram().largest == 4


def test_nothing_gathered_is_an_empty_histogram():
    found = ExponentCounts().histogram()
    assert (found.largest, found.smallest, found.counts, found.batches) == (None, None, {}, 0)


@pytest.mark.parametrize(("scale", "least"), [(1.0, -24), (2.0**10, -34)])
def test_float16_keeps_what_its_subnormals_reach(scale, least):
    assert least_float16_exponent(scale) == least


def test_an_error_is_relative_to_the_reference():
    assert relative_error(0.25, 1.0) == 0.5
    assert relative_error(0.0, 0.0) == 0.0
    assert relative_error(1.0, 0.0) is None
    assert relative_error(math.inf, 1.0) is None
    assert relative_error(math.nan, 1.0) is None
