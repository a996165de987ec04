"""Single steps: losses and gradients at the same weights, and what noise excuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoprec.core.numerics.single_step import (
    MIN_NOISE_SHARE,
    NOISE_ROUNDOFF,
    check_single_steps,
    is_noise_sensitive,
)
from autoprec.core.numerics.tolerance import Check
from autoprec.core.numerics.traces import NoisyStep, StepComparison
from tests.core.evidence import DEFAULT, points


def test_a_gradient_that_is_far_off_or_not_finite_fails_the_single_step():
    assert "gradient" in check_single_steps(points(error=0.6), (), DEFAULT).problem
    far = check_single_steps(points(error=None), (), DEFAULT)
    assert not far.passed
    assert far.gradient_error is None


@pytest.mark.parametrize(
    ("steps", "deviation", "error", "passes"),
    [
        ((8,), 0.019, 0.01, True),
        ((8,), 0.021, 0.01, False),  # more than twice what is allowed
        ((2, 8), 0.019, 0.01, False),
        ((29,), 0.019, 0.01, False),  # nothing was seen after it
        ((29,), 0.0, 0.9, True),
        ((29,), 0.0, 1.1, False),
        ((8,), 0.0, 1.0, True),  # twice what is allowed
    ],
)
def test_one_checkpoint_a_little_off_was_passed_through(steps, deviation, error, passes):
    off = {p.step: p for p in points(deviation, error)}
    seen = tuple(off[p.step] if p.step in steps else p for p in points())
    assert check_single_steps(seen, (), DEFAULT).passed is passes
    assert not check_single_steps(seen[-2:], (), DEFAULT).passed  # too few to say


def test_a_finer_format_has_less_of_the_loss_tolerance():
    float16 = 2.0**-11
    assert check_single_steps(points(0.009), (), DEFAULT).passed
    assert not check_single_steps(points(0.009), (), DEFAULT, float16).passed
    assert check_single_steps(points(0.007), (), DEFAULT, float16).passed


def test_noise_never_excuses_another_gradient_at_most_checkpoints():
    noise = tuple(NoisyStep(s, 2.0, 2.0, 0.4) for s in (0, 2, 8, 29))  # float32 bears it
    once = tuple(replace(p, gradient_error=1.1 if p.step == 8 else 0.4) for p in points())
    thrice = tuple(replace(p, gradient_error=0.4 if p.step == 8 else 0.7) for p in points())
    assert check_single_steps(once, noise, DEFAULT).passed
    assert "at most of 4 checkpoints" in check_single_steps(thrice, noise, DEFAULT).problem
    assert check_single_steps(thrice[:2], noise, DEFAULT).passed  # too few to say


def test_noise_widens_what_a_single_step_allows():
    noisy = (NoisyStep(0, 2.1, 2.0, 0.01),)
    assert not check_single_steps(points(0.05), (), DEFAULT).passed
    assert check_single_steps(points(0.05), noisy, DEFAULT).passed


def test_a_finer_format_answers_for_less_noise():
    noisy = (NoisyStep(0, 2.1, 2.0, 0.3),)
    assert check_single_steps(points(0.15), noisy, DEFAULT).passed
    finer = check_single_steps(points(0.15), noisy, DEFAULT, roundoff=2.0**-11)
    assert not finer.passed
    assert finer.noise == pytest.approx(0.05 * MIN_NOISE_SHARE)
    assert finer.gradient_noise == pytest.approx(0.3 * MIN_NOISE_SHARE)


def test_a_choice_that_noise_flips_may_flip_in_a_finer_format_too():
    flipped = (NoisyStep(0, 2.0, 2.0, 0.001), NoisyStep(29, 1.86, 2.0, 0.646))
    same = (StepComparison(0, 2.0, 2.0, 0.001), StepComparison(29, 1.86, 2.0, 0.647))
    assert check_single_steps(same, flipped, DEFAULT, roundoff=2.0**-11).passed


def test_a_converged_gradient_is_excused_where_noise_moves_it_too():
    noise = (NoisyStep(0, 2.0, 2.0, 0.01), NoisyStep(29, 2.0, 2.0, 0.8))
    late = (StepComparison(0, 2.0, 2.0, 0.01), StepComparison(29, 2.0, 2.0, 2.1))
    early = (StepComparison(0, 2.0, 2.0, 2.1), StepComparison(29, 2.0, 2.0, 0.01))
    assert check_single_steps(late, noise, DEFAULT).passed
    assert "step 0" in check_single_steps(early, noise, DEFAULT).problem


def test_a_gradient_that_is_lost_is_never_excused_by_noise_elsewhere():
    noise = (NoisyStep(0, 2.0, 2.0, 0.01), NoisyStep(29, 2.0, 2.0, 3.0))
    assert not check_single_steps((StepComparison(0, 2.0, 2.0, 1.0),), noise, DEFAULT).passed


def test_a_deviation_that_is_passed_through_is_left_to_the_trajectories():
    def deviating(*steps: int) -> tuple[StepComparison, ...]:
        return tuple(
            StepComparison(step, 2.03 if step in steps else 2.0, 2.0, 0.01)
            for step in (0, 2, 8, 29)
        )

    assert check_single_steps(deviating(0), (), DEFAULT).passed
    assert not check_single_steps(deviating(0, 2), (), DEFAULT).passed
    assert not check_single_steps(deviating(29), (), DEFAULT).passed
    assert not check_single_steps(deviating(0)[:2], (), DEFAULT).passed


def test_what_is_far_beyond_the_limit_is_not_passed_through():
    points_ = tuple(
        StepComparison(step, 2.2 if step == 2 else 2.0, 2.0, 0.01) for step in (0, 2, 8, 29)
    )
    assert not check_single_steps(points_, (), DEFAULT).passed


def test_without_checkpoints_or_noise_nothing_is_made_up():
    assert check_single_steps((), (), DEFAULT) == Check(judged=False)
    found = check_single_steps(points(0.005), (), DEFAULT)
    assert found == Check(deviation=pytest.approx(0.005), gradient_error=0.01)
    unknown = (NoisyStep(0, 2.0, 2.0, None),)
    assert check_single_steps(points(), unknown, DEFAULT).gradient_noise == 0.0
    assert not is_noise_sensitive(unknown, DEFAULT)
    assert not is_noise_sensitive((), DEFAULT)


def test_a_coarser_format_is_allowed_no_more_than_bfloat16():
    noisy = (NoisyStep(0, 2.1, 2.0, 0.3),)
    found = check_single_steps(points(0.15), noisy, DEFAULT, roundoff=2 * NOISE_ROUNDOFF)
    assert (found.noise, found.gradient_noise) == (pytest.approx(0.05), 0.3)


def test_a_gradient_may_deviate_by_what_is_allowed():
    assert check_single_steps(points(error=DEFAULT.gradient), (), DEFAULT).passed


def test_noise_elsewhere_excuses_what_is_short_of_a_lost_gradient():
    noise = (NoisyStep(0, 2.0, 2.0, 0.2),)  # four times of it, but never 0.9
    assert check_single_steps((StepComparison(29, 2.0, 2.0, 0.79),), noise, DEFAULT).passed
    assert not check_single_steps((StepComparison(29, 2.0, 2.0, 0.81),), noise, DEFAULT).passed


def test_what_failed_says_where_by_how_much_and_what_is_allowed():
    far = check_single_steps(points(error=0.6), (), DEFAULT)
    assert far.problem == (
        "at the same weights and batch of step 0 its gradient is 60 % away from float32's; 50 % is "
        "allowed"
    )
    assert (far.step, far.undecided, far.of_loss) == (0, "near_limit", False)
    of_loss = check_single_steps((StepComparison(0, 3.0, 2.0, 0.0),), (), DEFAULT)
    assert (of_loss.passed, of_loss.of_loss) == (False, True)
    noise = (NoisyStep(0, 2.0, 2.0, 0.4),)
    most = check_single_steps(
        [StepComparison(step, 2.0, 2.0, error) for step, error in ((0, 0.4), (2, 0.7), (8, 0.8))],
        noise,
        DEFAULT,
    )
    assert most == Check(
        problem="at most of 3 checkpoints its gradient is 70 % or more away from float32's; 50 % "
        "is allowed",
        step=0,
        undecided="near_limit",
        deviation=0.0,
        gradient_error=0.8,
        noise=0.0,
        gradient_noise=0.4,
    )


def test_of_three_checkpoints_one_may_be_a_little_off():
    steps = [StepComparison(0, 2.03, 2.0, 0.01), *points()[2:]]
    assert check_single_steps(steps, (), DEFAULT).passed
    assert not check_single_steps([steps[0], steps[0], steps[2]], (), DEFAULT).passed


@pytest.mark.parametrize(
    ("deviations", "errors", "undecided"),
    [
        ((0.0, 0.0), (0.0, 0.0), ""),  # nothing failed
        ((0.05, -0.006), (0.1, 0.1), "both_signs"),
        ((0.05, -0.004), (0.1, 0.1), ""),  # as good as nothing below
        ((0.05, -0.05), (0.5, 0.5), "both_signs"),
        ((0.05, -0.05), (0.1, 0.6), ""),  # a gradient is another's
        ((0.09, -0.05), (0.1, 0.1), "both_signs"),
        ((0.11, -0.05), (0.1, 0.1), ""),  # too far
        ((0.019, 0.015), (0.1, 0.1), "near_limit"),
        ((0.019, 0.015), (0.1, 0.8), "near_limit"),
        ((0.019, 0.015), (0.1, None), ""),
        ((0.021, 0.015), (0.1, 0.1), ""),
    ],
)
def test_what_failed_may_be_for_training_to_decide(deviations, errors, undecided):
    seen = [
        StepComparison(step, 2.0 * (1 + deviation), 2.0, error)
        for step, (deviation, error) in enumerate(zip(deviations, errors, strict=True))
    ]
    found = check_single_steps(seen, (), DEFAULT)
    assert found.passed is (max(deviations) == 0.0)
    assert found.undecided == undecided


@pytest.mark.parametrize(
    ("deviation", "passes", "undecided"),
    [
        (0.034, True, ""),
        (0.036, True, "noise_level"),
        (0.19, True, "noise_level"),
        (0.21, False, "near_limit"),
    ],
)
def test_what_passes_because_noise_goes_as_far_is_for_training_to_decide(
    deviation, passes, undecided
):
    noise = (NoisyStep(0, 2.1, 2.0, 0.01),)
    found = check_single_steps(points(deviation), noise, DEFAULT)
    assert (found.passed, found.undecided) == (passes, undecided)


def test_noise_is_sensitive_where_most_steps_have_a_draw_that_breaks_the_gradient():
    def sensitive(*errors: tuple[int, float]) -> bool:
        return is_noise_sensitive([NoisyStep(s, 2.0, 2.0, error) for s, error in errors], DEFAULT)

    assert sensitive((0, 0.9), (0, 0.1), (2, 0.1), (2, 0.9))  # the largest of a step counts
    assert not sensitive((0, 0.1), (2, 0.9))
    assert sensitive((0, 0.1), (2, 0.9), (8, 0.9))
    assert not sensitive((0, 0.1), (2, 0.1), (8, 0.9))
    assert not sensitive((0, 0.5))


def test_limits_of_what_training_may_decide_are_allowed_themselves():
    wide = replace(DEFAULT, loss=1 / 64)

    def undecided(*sixty_fourths: float) -> str:
        seen = [
            StepComparison(step, 2.0 * (1 + share / 64), 2.0, 0.01)
            for step, share in enumerate(sixty_fourths)
        ]
        return check_single_steps(seen, (), wide).undecided

    assert undecided(10, -0.5) == "both_signs"
    assert undecided(10.01, -0.5) == undecided(10, -0.49) == ""
    assert undecided(2, 2) == "near_limit"
    assert undecided(2, 2.01) == ""
