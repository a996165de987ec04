"""The loss scale: as large as the gradients bear, with head-room, a floor and a reason to stop."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.core.numerics.loss_scale_choice import (
    DEFAULT_EXPONENT,
    FLOOR_OCTAVES,
    HEADROOM_OCTAVES,
    MAX_EXPONENT,
    MIN_EXPONENT,
    ScaleEvidence,
    floor_exponent,
    growth_interval,
    initial_exponent,
    is_near_limit,
    largest_safe_exponent,
    longest_streak,
    next_exponent,
    recommended_scale,
    scale_cost,
    underflow_share,
)
from autoprec.core.numerics.traces import ExponentHistogram

MEASURED = ExponentHistogram(-3, -30, {"-3": 0.25, "-20": 0.5, "-30": 0.25}, batches=8)
NOTHING = ExponentHistogram(None, None)


def evidence(exponent: int, safe: int | None) -> ScaleEvidence:
    return ScaleEvidence(exponent, safe, None, None, 0.0)


def test_the_largest_gradient_times_the_safe_scale_just_fits_float16():
    safe = largest_safe_exponent(MEASURED)
    assert safe == 18
    assert 2.0 ** (MEASURED.largest + safe + 1) <= 2.0**16


def test_the_start_leaves_head_room():
    assert initial_exponent(MEASURED) == 18 - HEADROOM_OCTAVES
    assert initial_exponent(MEASURED, headroom=0) == 18


@pytest.mark.parametrize(("largest", "near"), [(8, False), (9, True), (14, True)])
def test_gradients_within_six_octaves_of_the_limit_are_near_it(largest, near):
    histogram = ExponentHistogram(largest, -30, {}, batches=8)
    chosen = recommended_scale(evidence(initial_exponent(histogram), None))
    assert is_near_limit(chosen) is near


def test_where_nothing_was_measured_the_usual_start_is_taken():
    assert largest_safe_exponent(NOTHING) is None
    assert initial_exponent(NOTHING) == DEFAULT_EXPONENT
    assert recommended_scale(evidence(16, None)).floor == 2.0 ** (
        16 + HEADROOM_OCTAVES - FLOOR_OCTAVES
    )


def test_underflow_is_the_gradient_below_the_smallest_subnormal():
    equal = ExponentHistogram(-3, -4, {"-3": 1 / 3, "-4": 2 / 3})
    assert underflow_share(equal, -20) == 0.0
    assert underflow_share(equal, -21) == pytest.approx(0.5)
    assert underflow_share(equal, -22) == 1.0
    assert underflow_share(NOTHING, 0) == 0.0


def test_tiny_elements_beside_large_ones_are_next_to_nothing():
    assert underflow_share(MEASURED, 5) < 1e-6
    assert underflow_share(MEASURED, -30) == 1.0


def test_the_objective_adds_skipped_steps_and_lost_gradient():
    assert scale_cost(0.1, 0.25) == pytest.approx(0.35)


def test_a_scale_that_costs_nothing_ends_the_trials():
    assert next_exponent(14, {}) == 14
    assert next_exponent(14, {14: (0.0, 0.0)}) is None


def test_skips_lead_down_and_lost_gradient_up_each_time_further():
    assert next_exponent(14, {14: (0.2, 0.0)}) == 12
    assert next_exponent(14, {14: (0.2, 0.0), 12: (0.1, 0.0)}) == 8
    assert next_exponent(14, {14: (0.0, 0.5)}) == 16
    assert next_exponent(14, {14: (0.0, 0.5), 16: (0.0, 0.4)}) == 20


def test_between_skips_and_lost_gradient_the_trials_end():
    assert next_exponent(14, {14: (0.0, 0.5), 16: (0.1, 0.0)}) is None
    assert next_exponent(MIN_EXPONENT, {MIN_EXPONENT: (1.0, 0.0)}) is None
    assert next_exponent(MAX_EXPONENT, {MAX_EXPONENT: (0.0, 1.0)}) is None


@given(st.integers(-140, 140))
def test_scales_stay_within_what_a_recipe_may_hold(largest):
    histogram = ExponentHistogram(largest, largest)
    start = initial_exponent(histogram)
    scale = recommended_scale(evidence(start, largest_safe_exponent(histogram)))
    assert MIN_EXPONENT <= start <= MAX_EXPONENT
    assert 2.0**MIN_EXPONENT <= scale.floor <= scale.initial <= 2.0**MAX_EXPONENT


@given(st.integers(-20, 60), st.integers(0, 20))
def test_the_floor_is_twelve_octaves_below_what_is_safe(safe, headroom):
    floor = floor_exponent(safe, safe - headroom)
    assert floor == max(MIN_EXPONENT, min(safe - headroom, safe - FLOOR_OCTAVES))


@given(
    st.dictionaries(st.integers(-60, 20).map(str), st.floats(0, 1), max_size=8),
    st.integers(-20, 60),
)
def test_a_larger_scale_never_loses_more(counts, exponent):
    histogram = ExponentHistogram(0, -60, counts)
    assert underflow_share(histogram, exponent + 1) <= underflow_share(histogram, exponent) + 1e-12


@given(
    st.integers(MIN_EXPONENT, MAX_EXPONENT),
    st.dictionaries(
        st.integers(MIN_EXPONENT, MAX_EXPONENT),
        st.tuples(st.floats(0, 1), st.floats(0, 1)),
        max_size=4,
    ),
)
def test_no_exponent_is_proposed_twice(start, tried):
    assert next_exponent(start, tried) not in tried


@pytest.mark.parametrize(
    ("steps", "longest"),
    [([], 0), ([3], 1), ([1, 3, 5], 1), ([0, 1, 2, 7, 8], 3), ([8, 7, 1], 2)],
)
def test_the_longest_run_of_skipped_steps(steps, longest):
    assert longest_streak(steps) == longest


def test_the_growth_interval_follows_from_what_an_overflow_costs():
    assert growth_interval(0) == growth_interval(1) == growth_interval(2) == 2000
    assert growth_interval(4) == 4000
