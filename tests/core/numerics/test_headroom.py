"""float16's head-room: numbers that grow, or leap, towards the largest it can hold."""

from __future__ import annotations

import pytest

from autoprec.core.numerics.headroom import check_headroom, needs_later_checkpoints
from autoprec.core.numerics.judging import judge
from autoprec.core.numerics.tolerance import Check
from autoprec.core.numerics.traces import StepComparison
from autoprec.core.numerics.verdict import ProofEvidence
from tests.core.evidence import DEFAULT, points


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
        ((512.0, 699.0, 512.0, 699.0), True),  # three times the deviations that are too many
        ((512.0, 657.0, 512.0, 657.0), False),
        ((0.5, 130.0, 130.0, 130.0), True),
        ((0.0, 130.0, 130.0, 130.0), False),  # 0 is no magnitude
        ((None, None, None, None), False),
    ],
)
def test_more_is_looked_at_where_four_checkpoints_leave_a_doubt(largest, wanted):
    assert needs_later_checkpoints(growing(*largest)) is wanted


def test_two_checkpoints_are_too_few_for_a_doubt_and_three_are_not():
    leaping = growing(824.0, 262.0, 421.0, 734.0)
    assert not needs_later_checkpoints(leaping[:2])
    assert needs_later_checkpoints(leaping[:3])


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
    assert check_headroom(growing(*largest)) == Check()


def test_growth_is_judged_from_three_checkpoints_on():
    assert check_headroom(growing(1.0, 2e4, 3e4, 6e4)[:3]) == Check(judged=False)
    early = [StepComparison(step, 1.0, 1.0, 0.0, 100.0) for step in (1, 2, 3)]
    assert check_headroom(early).judged
    assert check_headroom(points()) == Check(judged=False)  # nothing in float16


def test_float16_numbers_that_vary_much_near_the_limit_are_drift():
    check = check_headroom(growing(1300.0, 9000.0, 700.0, 140.0))
    assert "varies from 140 to 9e+03" in check.problem
    assert check_headroom(growing(None, 9000.0, 700.0, 140.0)).passed
    small = check_headroom(growing(0.5, 9000.0, 700.0, 140.0))
    assert "varies from 0.5 to 9e+03" in small.problem
    assert "varies from 140" in check_headroom(growing(0.0, 9000.0, 700.0, 140.0)).problem


def test_what_is_foreseen_is_told_with_its_steps():
    assert check_headroom(growing(1000.0, 2000.0, 5000.0, 30000.0)).problem == (
        "the largest float16 number of its forward pass grew from 5e+03 at step 8 to 3e+04 at "
        "step 29; so it overflows by step 46"
    )
    assert check_headroom(growing(10.0, 2000.0, 5000.0, None)).problem == (
        "the largest float16 number of its forward pass, 10 at step 0, is infinite at step 29"
    )


@pytest.mark.parametrize(
    ("less", "step"),
    [
        (2380.0, 294),  # soon: before ten times the 30 steps that were made
        (2440.0, None),  # by step 305
    ],
)
def test_growth_counts_where_it_overflows_within_ten_times_the_steps(less, step):
    found = check_headroom(growing(2100.0, 2200.0, less, 4096.0))
    assert found.passed is (step is None)
    assert step is None or f"overflows by step {step}" in found.problem


def test_growth_is_growth_at_all_three_checkpoints():
    level = check_headroom(growing(5000.0, 5000.0, 5000.0, 30000.0))
    assert "varies from" in level.problem
    assert check_headroom(growing(4000.0, 4200.0, 5000.0, 5000.0)).passed


def test_with_later_checkpoints_growth_counts_from_the_last_of_the_first():
    early = growing(600.0, 700.0, 900.0, 1600.0)
    late = later(1590.0, 1400.0, 1500.0, 1700.0, 1900.0, 2200.0)
    assert check_headroom(early, late).passed  # it was 1600 before it was 1500
    lower = growing(600.0, 700.0, 900.0, 1000.0)
    rises = later(1000.0, 900.0, 1500.0, 1700.0, 1900.0, 2200.0)
    found = check_headroom(lower, rises)  # it was 1500 midway, whatever it was before that
    assert "grew from 1.5e+03 at step 44" in found.problem
