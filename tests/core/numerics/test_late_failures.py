"""What shows late: where long runs end, error floors, and gradients that will overflow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoprec.core.numerics.late_failures import (
    check_error_floor,
    check_gradient_growth,
    check_long_runs,
    deviation_grows,
    magnitudes_grow,
    needs_more_steps,
    needs_second_seed,
)
from autoprec.core.numerics.loss_curves import SeedRun
from autoprec.core.numerics.parity import judge
from autoprec.core.numerics.traces import NoisyStep, StepComparison, Trajectory
from tests.core.evidence import DEFAULT, evidence, times

STEPS = 240
CURVE = tuple(2.0 / (1 + step) for step in range(STEPS))


def long(share: float, noisy: float | None = None, **kwargs) -> SeedRun:
    """A run whose end is off by a share, and one whose end noise moves by another."""
    return SeedRun(
        Trajectory(CURVE),
        Trajectory(tuple((1 + share) * loss for loss in CURVE), **kwargs),
        None if noisy is None else Trajectory(tuple((1 + noisy) * loss for loss in CURVE)),
    )


@pytest.mark.parametrize(
    ("runs", "passed"),
    [
        ([long(0.09, 0.0), long(0.09, 0.0)], True),
        ([long(0.12, 0.0), long(0.12, 0.0)], False),
        ([long(-0.12, 0.0), long(-0.12, 0.0)], False),
        ([long(0.3, 0.0), long(-0.01, 0.0)], True),  # the seeds do not agree
        ([long(0.3, 0.11), long(0.3, 0.11)], True),  # noise does as much
        ([long(0.3, 0.09), long(0.3, 0.09)], False),
    ],
)
def test_a_long_run_is_off_where_its_seeds_agree_beyond_noise(runs, passed):
    found = check_long_runs(runs, DEFAULT)
    assert found.passed is passed
    assert passed or "over 2 seeds" in found.problem


def test_what_ends_near_float32_needs_no_second_seed():
    assert not needs_second_seed(long(0.04), DEFAULT)
    assert needs_second_seed(long(0.06), DEFAULT)
    assert not check_long_runs((), DEFAULT).judged


@pytest.mark.parametrize(
    ("away", "leaning"),
    [
        ((0.0, 0.003, 0.006), True),
        ((0.0, -0.003, -0.006), True),
        ((0.0, -0.003, 0.006), True),  # a single batch's loss is off in any direction
        ((0.0, 0.003, 0.004), False),  # too little
        ((0.0, 0.008, 0.006), False),  # no more than before
        ((0.006,), False),
    ],
)
def test_a_loss_that_leaves_float32_from_mark_to_mark_leans(away, leaning):
    points = [StepComparison(step, 2 * (1 + share), 2.0, 0.01) for step, share in enumerate(away)]
    assert deviation_grows(points, DEFAULT) is leaning


@pytest.mark.parametrize(
    ("largest", "backward", "growing"),
    [
        ((100.0, 100.0, 150.0), None, True),
        ((100.0, 100.0, 149.0), None, False),
        ((100.0, 200.0, 200.0), None, False),  # it came to rest
        (None, (1.0, 2.0), True),
        (None, None, False),
        ((100.0,), None, False),
    ],
)
def test_float16_numbers_that_double_from_mark_to_mark_grow(largest, backward, growing):
    count = len(largest or backward or (0, 0))
    points = [
        StepComparison(
            step,
            2.0,
            2.0,
            0.01,
            largest=largest[step] if largest else None,
            backward=backward[step] if backward else None,
        )
        for step in range(count)
    ]
    assert magnitudes_grow(points) is growing


@pytest.mark.parametrize(
    ("away", "noise", "more"), [(0.04, 0.0, False), (0.07, 0.0, True), (0.07, 0.03, False)]
)
def test_seeds_that_lean_the_same_way_a_little_are_followed_further(away, noise, more):
    runs = [long(away, noise), long(away, noise)]
    assert needs_more_steps(runs, DEFAULT) is more
    assert not needs_more_steps([long(0.2, 0.0), long(0.2, 0.0)], DEFAULT)
    assert not needs_more_steps([long(away, 0.0), long(-away, 0.0)], DEFAULT)


def test_float32_that_breaks_later_on_tells_nothing():
    lost = Trajectory((*CURVE[:-1], None))
    assert not check_long_runs([SeedRun(lost, Trajectory(CURVE))], DEFAULT).judged


def test_a_long_run_must_stay_finite_and_keep_its_steps():
    lost = replace(long(0.0), candidate=Trajectory((*CURVE[:70], None, *CURVE[71:])))
    assert check_long_runs([lost], DEFAULT).problem == "the loss is not finite at step 70"
    skips = long(0.0, skipped=(60, 70, 71, 90, 95))
    assert "5 of 240 steps were skipped" in check_long_runs([skips], DEFAULT).problem
    assert check_long_runs([long(0.0, skipped=(60, 70, 71, 90))], DEFAULT).passed
    assert not needs_second_seed(skips, DEFAULT)


def test_where_float32s_seeds_end_far_apart_no_loss_curve_tells_less():
    other = tuple(3 * loss for loss in CURVE)
    apart = SeedRun(
        Trajectory(other), Trajectory(tuple(1.3 * loss for loss in other)), Trajectory(other)
    )
    assert check_long_runs([long(0.3, 0.0), apart], DEFAULT).passed
    near = [long(0.3, 0.0), long(0.3, 0.0)]
    assert not check_long_runs(near, DEFAULT).passed


def test_a_break_that_shows_late_is_rejected_although_the_first_steps_passed():
    early = evidence(times(1.001))
    late = replace(early, long_runs=(long(0.3, 0.0), long(0.3, 0.0)))
    assert judge(early, DEFAULT).accepted
    verdict = judge(late, DEFAULT)
    assert (verdict.verdict, verdict.step, verdict.steps) == ("rejected", 240, 240)
    passed = judge(replace(early, long_runs=(long(0.01),)), DEFAULT)
    assert passed.accepted
    assert "equal over the first 240 steps" in passed.reason


# Error floors ------------------------------------------------------------------------------------


def comparisons_at(excess, steps=(8, 29, 59, 119)) -> tuple[StepComparison, ...]:
    """Marks on the curve at which a loss is above float32's by what `excess` says of it."""
    return tuple(StepComparison(s, CURVE[s] + excess(CURVE[s]), CURVE[s], 0.01) for s in steps)


QUIET = tuple(NoisyStep(step, CURVE[step], CURVE[step]) for step in (8, 29, 59, 119))
SHORTER = SeedRun(Trajectory(CURVE[:120]), Trajectory(tuple(loss + 1e-3 for loss in CURVE[:120])))


@pytest.mark.parametrize(
    ("excess", "passed"),
    [
        (lambda loss: 1e-3, False),  # 0.4 % of the loss at step 8, 6 % at step 119
        (lambda loss: 1e-5, True),  # next to nothing of it
        (lambda loss: 0.009 * loss, True),  # always the same share
        (lambda loss: -1e-3, True),
        (lambda loss: 1e-2 * loss**2, True),  # it goes before the loss does
    ],
)
def test_an_error_that_stays_while_the_loss_falls_is_a_floor(excess, passed):
    found = check_error_floor(comparisons_at(excess), QUIET, SHORTER, DEFAULT)
    assert found.passed is passed
    assert passed or "stays constant while the loss falls" in found.problem


def test_a_floor_is_read_from_means_where_single_batches_hide_it():
    points = comparisons_at(lambda loss: 1e-3)
    hidden = [replace(p, loss=p.reference + e) for p, e in zip(points, (1, -3, 2, -2), strict=True)]
    assert check_error_floor(hidden, QUIET, SHORTER, DEFAULT).passed
    means = {p.step: {"mean_loss": p.loss, "mean_reference": p.reference} for p in points}
    shown = [replace(p, **means[p.step]) for p in hidden]
    found = check_error_floor(shown, QUIET, SHORTER, DEFAULT)
    assert found.problem == check_error_floor(points, QUIET, SHORTER, DEFAULT).problem
    assert not found.passed
    none = {"mean_loss": None}  # not finite on one of the further batches
    assert check_error_floor([replace(p, **none) for p in shown], QUIET, SHORTER, DEFAULT).passed


@pytest.mark.parametrize(
    ("errors", "passed"),
    [
        ((0.0, 0.0, 0.0, 1e-4), False),  # ten standard errors
        ((0.0, 0.0, 0.0, 4.9e-4), True),  # two: nothing is sure of it
        ((0.0, 1e-4, 1e-4, 1e-4), False),
        ((0.0, 1.0, 0.0, 1e-4), True),  # as large a share may have been there at step 29
    ],
)
def test_a_mean_counts_as_far_as_its_standard_error_lets_it(errors, passed):
    points = [
        replace(p, mean_loss=p.loss, mean_reference=p.reference, mean_error=error)
        for p, error in zip(comparisons_at(lambda loss: 1e-3), errors, strict=True)
    ]
    assert check_error_floor(points, QUIET, SHORTER, DEFAULT).passed is passed


def test_an_excess_below_zero_within_its_error_is_a_floor_all_the_same():
    excess, errors = (-1e-4, 2e-4, 1e-3), (2e-4, 2e-4, 1e-4)
    points = [
        replace(p, mean_loss=p.reference + e, mean_reference=p.reference, mean_error=error)
        for p, e, error in zip(comparisons_at(lambda loss: 0.0)[1:], excess, errors, strict=True)
    ]
    assert not check_error_floor(points, QUIET, SHORTER, DEFAULT).passed
    certain = [replace(p, mean_error=0.0) for p in points]
    assert check_error_floor(certain, QUIET, SHORTER, DEFAULT).passed


def test_means_are_of_the_same_batches_and_have_the_error_of_their_difference():
    point = StepComparison(119, 1.0, 1.0, 0.01)
    found = point.with_mean_losses((1.0, 2.5, 4.0), (1.0, 2.0, 3.0))
    assert found.losses == (2.5, 2.0)
    assert found.mean_error == pytest.approx(0.5 / 3**0.5)  # differences 0, 0.5 and 1
    assert point.with_mean_losses((), ()) == point
    assert point.with_mean_losses((1.0, float("nan")), (1.0, 1.0)) == point
    assert point.with_mean_losses((1.0,), (1.0,)).mean_error == float("inf")


def test_no_floor_is_foretold_where_the_loss_has_settled_or_noise_does_as_much():
    points = comparisons_at(lambda loss: 1e-3)
    settled = Trajectory(tuple(2.0 for _ in range(120)))
    assert not check_error_floor(points, QUIET, SeedRun(settled, settled), DEFAULT).judged
    agrees = replace(SHORTER, candidate=SHORTER.reference)
    assert check_error_floor(points, QUIET, agrees, DEFAULT).passed
    noise = tuple(NoisyStep(p.step, p.reference + 1e-3, p.reference) for p in points)
    assert check_error_floor(points, noise, SHORTER, DEFAULT).passed
    assert not check_error_floor(points[:2], QUIET, SHORTER, DEFAULT).judged


def test_a_floor_is_drift():
    early, late = (
        comparisons_at(lambda loss: 2e-4, (0, 2, 8, 29)),
        comparisons_at(lambda loss: 4e-4, (59, 119)),
    )
    passed = evidence(times(1.0), comparisons=early, noise=QUIET)
    assert judge(passed, DEFAULT).accepted
    verdict = judge(replace(passed, late_comparisons=late, long_runs=(SHORTER,)), DEFAULT)
    assert verdict.verdict == "drift"
    assert "an error that stays" in verdict.reason


# Gradients ---------------------------------------------------------------------------------------


def backward(*exponents, steps=(8, 29, 59)) -> tuple[StepComparison, ...]:
    """Marks with the largest float16 numbers of their backward passes, as exponents of two."""
    return tuple(
        StepComparison(s, 1.0, 1.0, 0.01, backward=2.0**e)
        for s, e in zip(steps, exponents, strict=True)
    )


@pytest.mark.parametrize(
    ("exponents", "step"),
    [
        ((2, 7, 12), 104),  # five octaves for each doubling, and four are left
        ((2, 7, 15.9), 60),
        ((-9, -4, 1), None),  # still far away at four times the steps
        ((2, 12, 12.5), None),  # it stops
        ((12, 7, 12), None),
    ],
)
def test_gradients_that_grow_until_no_scale_helps_are_foreseen(exponents, step):
    found = check_gradient_growth(backward(*exponents))
    assert found.passed is (step is None)
    assert step is None or f"it will overflow at about step {step}" in found.problem


def test_gradients_that_will_overflow_are_drift_and_few_marks_tell_nothing():
    compared = backward(1, 2, 7, 12, steps=(0, 2, 8, 29))
    verdict = judge(evidence(times(1.0), comparisons=compared), DEFAULT)
    assert verdict.verdict == "drift"
    assert "whatever the loss scale" in verdict.reason
    assert not check_gradient_growth(compared[-2:]).judged
