"""What shows late: where long runs end, and gradients that will overflow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoprec.core.numerics.judging import judge
from autoprec.core.numerics.late_failures import (
    check_gradient_growth,
    check_long_run_stability,
    check_long_runs,
    deviation_grows,
    magnitudes_grow,
    needs_more_steps,
    needs_second_seed,
)
from autoprec.core.numerics.loss_curves import SeedRun
from autoprec.core.numerics.tolerance import Check
from autoprec.core.numerics.traces import StepComparison, Trajectory
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
        ([long(0.3, 0.0), long(0.0, 0.0)], True),
        ([long(-0.3, 0.0), long(0.0, 0.0)], True),
        ([long(0.3, 0.11), long(0.3, 0.11)], True),  # noise does as much
        ([long(0.3, 0.09), long(0.3, 0.09)], False),
    ],
)
def test_a_long_run_is_off_where_its_seeds_agree_beyond_noise(runs, passed):
    found = check_long_runs(runs, DEFAULT)
    assert found.passed is passed
    assert passed or "over 2 seeds" in found.problem


def test_a_long_run_says_how_far_it_ends_away_and_what_noise_does():
    found = check_long_runs([long(-0.3, 0.03), long(-0.3, 0.04)], DEFAULT)
    assert found.deviation == pytest.approx(0.3)
    assert found.noise == pytest.approx((0.5 * (0.03**2 + 0.04**2)) ** 0.5)
    assert (found.step, found.judged, found.of_loss) == (STEPS, True, True)
    assert found.problem == (
        "after 240 steps its loss is 30 % away from float32's over 2 seeds; noise in the weights "
        "moves it by 3.5 %"
    )
    near = check_long_runs([long(0.02)], DEFAULT)
    assert near == Check(deviation=pytest.approx(0.02), noise=0.0)


def ending(*losses: float, reference: tuple[float, ...]) -> SeedRun:
    """A run that is float32's but for its last losses."""
    kept = len(reference) - len(losses)
    return SeedRun(Trajectory(reference), Trajectory((*reference[:kept], *losses)))


def test_where_a_run_ends_is_the_mean_of_its_last_fifth():
    def deviation(run: SeedRun) -> float | None:
        return check_long_runs([run], DEFAULT).deviation

    assert deviation(ending(9.0, 8.0, reference=(8.0,) * 10)) == 1 / 16
    assert deviation(ending(9.0, 8.0, 8.0, reference=(8.0,) * 10)) == 0.0
    assert deviation(ending(9.0, 8.0, reference=(8.0,) * 5)) == 0.0
    longer = SeedRun(Trajectory((8.0,) * 5), Trajectory((8.0,) * 5 + (9.0,) * 5))
    assert deviation(longer) == 0.0


@pytest.mark.parametrize(("last", "passed"), [(1.9e-5, True), (2.1e-5, False), (0.0, True)])
def test_a_loss_that_falls_to_nothing_counts_as_a_share_of_the_first(last, passed):
    reference = (2.0, 0.02, *(0.0,) * 8)  # 2e-4 is the least that divides; a tenth may deviate
    assert check_long_runs([ending(last, last, reference=reference)], DEFAULT).passed is passed


@pytest.mark.parametrize(("first", "below"), [(2e4, 1e-4), (5e3, None)])
def test_what_ends_far_below_the_first_loss_is_told_with_that_share(first, below):
    assert check_long_runs([ending(reference=(first, *[1.0] * 9))], DEFAULT).below == below


def test_limits_are_allowed_themselves():
    wide = replace(DEFAULT, trajectory=1 / 16)
    at_limit = ending(9.0, 9.0, reference=(8.0,) * 10)
    assert check_long_runs([at_limit], wide).passed
    assert not check_long_runs([ending(9.0, 9.01, reference=(8.0,) * 10)], wide).passed
    half = ending(17.0, 17.0, reference=(16.0,) * 10)
    assert not needs_second_seed(half, wide)
    assert needs_second_seed(ending(17.0, 17.01, reference=(16.0,) * 10), wide)
    points = [StepComparison(step, loss, 2.0, 0.01) for step, loss in enumerate((2.0, 2 + 1 / 64))]
    assert deviation_grows(points, replace(DEFAULT, loss=1 / 64))
    assert not deviation_grows(points, replace(DEFAULT, loss=1 / 63))


def test_what_ends_near_float32_needs_no_second_seed():
    assert not needs_second_seed(long(0.04), DEFAULT)
    assert needs_second_seed(long(0.06), DEFAULT)
    assert check_long_runs((), DEFAULT) == Check(judged=False)


@pytest.mark.parametrize(
    ("away", "leaning"),
    [
        ((0.0, 0.003, 0.006), True),
        ((0.0, -0.003, -0.006), True),
        ((0.0, -0.003, 0.006), True),  # a single batch's loss is off in any direction
        ((0.0, 0.003, 0.004), False),  # too little
        ((0.0, 0.008, 0.006), False),  # no more than before
        ((0.0, 0.006, 0.006), False),
        ((0.0, 0.006), True),
        ((0.006,), False),
    ],
)
def test_a_loss_that_leaves_float32_from_mark_to_mark_leans(away, leaning):
    points = [StepComparison(step, 2 * (1 + share), 2.0, 0.01) for step, share in enumerate(away)]
    assert deviation_grows(points, DEFAULT) is leaning


@pytest.mark.parametrize(("last", "leaning"), [(2.9e-4, False), (3.1e-4, True)])
def test_a_small_loss_leans_by_a_share_of_the_first(last, leaning):
    points = [StepComparison(0, 2.0, 2.0, 0.01), StepComparison(1, 0.01, 0.01, 0.01)]
    points.append(StepComparison(2, 0.01 + last, 0.01, 0.01))  # 0.06 is the least that divides
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
    found = check_long_runs([lost], DEFAULT)
    assert found == Check(problem="the loss is not finite at step 70", step=70)
    skips = long(0.3, skipped=(60, 70, 71, 90, 95))
    found = check_long_runs([skips], DEFAULT)
    assert found == Check(
        problem="5 of 240 steps were skipped because gradients overflowed, the first of them "
        "step 60",
        step=60,
        skipped=5,
    )
    assert check_long_run_stability(skips.candidate, replace(DEFAULT, skipped=5)).passed
    assert check_long_runs([long(0.0, skipped=(60, 70, 71, 90))], DEFAULT).passed
    assert not needs_second_seed(skips, DEFAULT)
    assert check_long_run_stability(None, DEFAULT) == Check(judged=False)


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
        ((13, 14, 15), 120),  # an octave for each doubling, and one is left
        ((12, 13, 14), 240),
        ((11, 12, 13), None),  # 480 is beyond four times the steps
    ],
)
def test_gradients_that_grow_until_no_scale_helps_are_foreseen(exponents, step):
    found = check_gradient_growth(backward(*exponents))
    assert found.passed is (step is None)
    assert step is None or f"it will overflow at about step {step}," in found.problem


def test_growth_is_told_with_its_steps_and_measured_between_doublings():
    assert check_gradient_growth(backward(2, 7, 12)) == Check(
        problem="the largest float16 number of its backward pass grows from 4 at step 8 to 128 at "
        "step 29 to 4.1e+03 at step 59; so at a loss scale of 1 it will overflow at about step "
        "104, and a lower one only puts that off",
        step=59,
    )
    four_times = check_gradient_growth(backward(1, 6, 12, steps=(8, 29, 119)))
    assert "at about step 302," in four_times.problem  # three octaves a doubling, four are left
    far = check_gradient_growth(backward(-140, -139, -138, steps=(0, 1, 479)))
    assert far == Check()  # beyond what a float holds


def test_gradients_that_will_overflow_are_drift_and_few_marks_tell_nothing():
    compared = backward(1, 2, 7, 12, steps=(0, 2, 8, 29))
    verdict = judge(evidence(times(1.0), comparisons=compared), DEFAULT)
    assert (verdict.verdict, verdict.step) == ("drift", 29)
    assert "at a loss scale of 1" in verdict.reason
    assert check_gradient_growth(compared[-2:]) == Check(judged=False)
