"""float16's head-room: numbers that grow, or leap, towards the largest it can hold."""

from __future__ import annotations

import pytest

from autoprec.core.numerics.headroom import check_headroom, needs_later_checkpoints
from autoprec.core.numerics.parity import judge
from autoprec.core.numerics.traces import StepComparison
from autoprec.core.numerics.verdict import ProofEvidence
from tests.core.evidence import DEFAULT


def growing(*largest: float | None) -> tuple[StepComparison, ...]:
    steps = (0, 2, 8, 29)
    return tuple(
        StepComparison(step, 1.0, 1.0, 0.0, value, value is None)
        for step, value in zip(steps, largest, strict=True)
    )


def test_float16_numbers_that_grow_towards_the_limit_are_drift():
    points_ = growing(1000.0, 2000.0, 5000.0, 30000.0)
    assert "overflows by step" in check_headroom(points_).problem
    verdict = judge(ProofEvidence(comparisons=points_), DEFAULT)
    assert (verdict.verdict, verdict.step) == ("drift", 29)


@pytest.mark.parametrize("largest", [(10.0, 2000.0, 5000.0, None), (10.0, 20.0, None, 30.0)])
def test_float16_numbers_that_became_infinite_are_drift(largest):
    step = 29 if largest[-1] is None else 8
    assert f"is infinite at step {step}" in check_headroom(growing(*largest)).problem


def later(*largest: float | None) -> tuple[StepComparison, ...]:
    steps = (34, 39, 44, 49, 54, 59)
    return tuple(
        StepComparison(step, 1.0, 1.0, 0.0, value, value is None)
        for step, value in zip(steps, largest, strict=True)
    )


@pytest.mark.parametrize(
    ("largest", "wanted"),
    [
        ((824.0, 262.0, 421.0, 734.0), True),  # they leap, not far from the limit
        ((85.0, 88.0, 144.0, 1126.0), True),  # they grow
        ((824.0, 822.0, 810.0, 830.0), False),
        ((2.0, 16.0, 1.0, 9.0), False),
        ((None, None, None, None), False),
    ],
)
def test_more_is_looked_at_where_four_checkpoints_leave_a_doubt(largest, wanted):
    assert needs_later_checkpoints(growing(*largest)) is wanted


def test_a_trend_is_not_taken_for_leaps_between_batches():
    early = growing(85.0, 88.0, 144.0, 1126.0)
    settled = later(1820.0, 1900.0, 2244.0, 2310.0, 2100.0, 2240.0)
    assert check_headroom(early, settled).passed
    leaping = check_headroom(
        growing(140.0, 998.0, 126.0, 320.0), later(439, 429, 137, 67, 169, 236)
    )
    assert "varies from 67 to 998" in leaping.problem


def test_numbers_that_stopped_growing_are_no_drift():
    early = growing(85.0, 88.0, 144.0, 1126.0)
    assert not check_headroom(early).passed
    assert check_headroom(early, later(1800.0, 2200.0, 2400.0, 2300.0, 2100.0, 2244.0)).passed
    assert not check_headroom(early, later(2e3, 3e3, 4e3, 8e3, 1.6e4, 4e4)).passed
    assert not check_headroom(early, later(2e3, 3e3, 2e3, None, 2e3, 3e3)).passed
    restless = check_headroom(early, later(300.0, 9e3, 200.0, 2e4, 400.0, 150.0))
    assert "varies from" in restless.problem


@pytest.mark.parametrize(
    "largest",
    [
        (1.0, 2.0, 2.5, 3.0),  # far from the limit
        (9e3, 1e4, 9.5e3, 9e3),  # near the limit, but quiet
        (1.0, 40.0, 20.0, 100.0),  # restless, but far from it
        (None, None, None, None),  # infinite from the start, as masks are
    ],
)
def test_other_large_numbers_are_left_to_the_other_tests(largest):
    assert check_headroom(growing(*largest)).passed


def test_growth_is_judged_from_three_checkpoints_on():
    assert not check_headroom(growing(1.0, 2e4, 3e4, 6e4)[:3]).judged


def test_float16_numbers_that_vary_much_near_the_limit_are_drift():
    check = check_headroom(growing(1300.0, 9000.0, 700.0, 140.0))
    assert "varies from 140 to 9e+03" in check.problem
    assert check_headroom(growing(None, 9000.0, 700.0, 140.0)).passed
