"""Single steps: losses and gradients at the same weights, and what noise excuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoprec.core.numerics.single_step import MIN_NOISE_SHARE, check_single_steps
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
