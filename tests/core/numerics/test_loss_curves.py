"""Trajectories and the user's metric, against float32's and what noise does to it."""

from __future__ import annotations

import math
import re

import pytest

from autoprec.core.numerics.judging import judge
from autoprec.core.numerics.loss_curves import (
    SeedRun,
    check_metric,
    check_stability,
    check_trajectory,
    seed_spread,
)
from autoprec.core.numerics.tolerance import Check
from autoprec.core.numerics.verdict import ProofEvidence
from tests.core.evidence import DEFAULT, FALLING, drifting, run, times


def test_chaos_that_noise_causes_too_is_not_blamed_on_the_precision():
    chaotic = SeedRun(run(), drifting(0.02), drifting(-0.015))
    assert check_trajectory((chaotic,), DEFAULT).passed


def test_noise_that_breaks_float32_excuses_everything_finite():
    broken = SeedRun(run(), drifting(0.02), run((*FALLING[:10], None, *FALLING[11:])))
    assert check_trajectory((broken,), DEFAULT).passed


def test_what_ended_because_it_was_not_finite_is_infinitely_far_away_to_the_end():
    noisy = SeedRun(run(), drifting(0.02), run((*FALLING[:10], None)))
    assert check_trajectory((noisy,), DEFAULT).passed
    lost = check_trajectory((SeedRun(run(), run((*FALLING[:3], None))),), DEFAULT)
    assert (lost.passed, lost.deviation, lost.second_half) == (False, None, None)


def test_without_a_noisy_run_only_the_slack_is_allowed():
    check = check_trajectory((SeedRun(run(), drifting(0.02)),), DEFAULT)
    assert not check.passed
    assert check.noise == 0.0


def test_a_trajectory_of_less_than_five_steps_is_not_judged():
    assert check_trajectory((SeedRun(run(), run(FALLING[:4])),), DEFAULT) == Check(judged=False)
    assert check_trajectory((SeedRun(run(), run(FALLING[:5])),), DEFAULT).judged


def test_the_users_metric_is_compared_over_seeds():
    good = [SeedRun(run(metric=0.9), run(metric=0.89), run(metric=0.88)) for _ in range(2)]
    bad = [SeedRun(run(metric=0.9), run(metric=0.7), run(metric=0.9)) for _ in range(2)]
    assert check_metric(good, DEFAULT).passed
    assert "0.7" in check_metric(bad, DEFAULT).problem
    assert judge(ProofEvidence(runs=tuple(bad)), DEFAULT).verdict == "rejected"
    assert "evaluate(model)" in judge(ProofEvidence(runs=tuple(good)), DEFAULT).covered


def test_metrics_after_different_numbers_of_steps_are_not_compared():
    pair = SeedRun(run(metric=0.9), run(FALLING[:9], metric=0.1))
    assert check_metric([pair], DEFAULT) == Check(judged=False)


@pytest.mark.parametrize(
    ("candidate", "noisy", "noise", "passed"),
    [
        (98.0, None, 0.0, True),  # two per cent of float32's are always allowed
        (97.9, None, 0.0, False),
        (97.0, 99.0, 1.0, True),  # and three times what noise does, be it for the better
        (97.0, 101.0, 1.0, True),
        (96.9, 99.0, 1.0, False),
        (150.0, None, 0.0, True),  # higher is better, however much
        (150.0, 99.9, 0.1, True),
    ],
)
def test_a_metric_may_drop_by_a_share_of_it_or_by_what_noise_does(candidate, noisy, noise, passed):
    disturbed = None if noisy is None else run(metric=noisy)
    found = check_metric([SeedRun(run(metric=100.0), run(metric=candidate), disturbed)], DEFAULT)
    numbers = {"value": candidate, "reference": 100.0, "noise": pytest.approx(noise)}
    said = f"evaluate(model) gives {candidate:.4g} where float32 reaches 100"
    assert found == (
        Check(**numbers) if passed else Check(**numbers, problem=said, step=len(FALLING))
    )


# The numbers themselves --------------------------------------------------------------------------


def test_steps_that_runs_skip_are_counted_together_and_bounded_for_each():
    few, many = run(skipped=(1,)), run(skipped=(4, 5, 6))
    assert check_stability([few, run(skipped=(2, 3)), run()], DEFAULT) == Check(skipped=3)
    assert check_stability([few, many, few], DEFAULT) == Check(
        problem="3 of 30 steps were skipped because gradients overflowed", step=4, skipped=4
    )
    broken = run((2.0, None, 1.0))
    assert check_stability([few, broken], DEFAULT) == Check(
        problem="the loss is not finite at step 1", step=1
    )


def test_a_run_is_measured_by_its_first_loss_its_last_fifth_and_its_second_half():
    """Ten steps from 2: the last fifth are two, the second half five; 0.06 divides at least."""
    reference = (2.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.01, 0.03)
    candidate = (2.0, 1.0, 1.0, 1.0, 1.5, 1.1, 1.0, 1.0, 0.01, 0.032)
    noisy = tuple(loss + 0.02 for loss in reference)
    found = check_trajectory((SeedRun(run(reference), run(candidate), run(noisy)),), DEFAULT)
    assert found.passed
    assert found.noise == pytest.approx(0.02 / 2)
    assert found.deviation == pytest.approx(0.001 / 0.06)
    distance = math.sqrt((0.5**2 + 0.1**2 + 0.002**2) / 10) / 2
    assert found.ratio == pytest.approx(distance / (0.01 + DEFAULT.trajectory_slack))
    assert found.second_half == pytest.approx(math.sqrt((0.1**2 + (0.002 / 0.06) ** 2) / 5))


def test_of_less_than_ten_steps_the_last_one_is_the_end():
    short = (2.0, 1.9, 1.8, 1.7, 1.0)
    found = check_trajectory((SeedRun(run(short), run((*short[:4], 1.2))),), DEFAULT)
    assert found.deviation == pytest.approx(0.2)


@pytest.mark.parametrize(("first", "step"), [(2.0, 7), (0.0, 3)])
def test_a_run_that_fails_parts_at_the_first_step_that_is_too_far_away(first, step):
    """Too far without noise is half a per cent of the first loss, of 1 where that is 0."""
    reference = (first, *(1.0,) * 9)
    candidate = (first, 1.0, 1.0, *(1.008,) * 4, *(2.0,) * 3)
    found = check_trajectory((SeedRun(run(reference), run(candidate)),), DEFAULT)
    assert (found.step, found.of_loss) == (step, True)
    ratio = math.sqrt((3 + 4 * 0.008**2) / 10) / (first or 1.0) / 0.001
    assert found.problem == (
        "after 10 steps its loss is 100 % away from float32's, "
        f"{ratio:.3g} times as far as small noise drives float32"
    )


@pytest.mark.parametrize(
    ("losses", "below"),
    [
        ((100.0, 100.0, 100.0, 100.0, 1.0), 0.03),  # of five steps the last one is the end
        ((100.0,) * 8 + (10.0, 0.1), None),  # of ten, two
        ((100.0, *(1.0,) * 4), 0.03),
        ((0.0, 1.0, 1.0, 1.0, 0.05), None),  # a first loss of 0 counts as 1
        ((0.0, 1.0, 1.0, 1.0, 0.02), 0.03),
    ],
)
def test_what_ends_far_below_the_first_loss_is_told_with_that_share(losses, below):
    assert check_trajectory((SeedRun(run(losses), run(losses)),), DEFAULT).below == below


def test_what_small_losses_differ_by_is_little_where_no_noise_was_run():
    """6 % at the end, but three thousandths of the first loss."""
    reference = (2.0, *(0.1,) * 9)
    found = check_trajectory((SeedRun(run(reference), run((2.0, *(0.106,) * 9))),), DEFAULT)
    assert found.deviation == pytest.approx(0.06)
    assert found.passed


@pytest.mark.parametrize(
    ("runs", "apart"),
    [
        ([(5.0,) * 8 + (1.0, 3.0), (5.0,) * 8 + (4.0, 4.0)], 2 / 3),  # two of ten steps
        ([(9.0, 9.0, 9.0, 9.0, 1.0), (9.0, 9.0, 9.0, 9.0, 2.0)], 2 / 3),  # one of five
        ([(0.75,) * 5, (1.25,) * 5], 0.5),
        ([(0.76,) * 5, (1.24,) * 5], 0.0),  # nearer than a half tells nothing
        ([(-1.0,) * 5, (1.0,) * 5], 0.0),  # around 0 there is no share
        ([(-1.0,) * 5, (-2.0,) * 5], 2 / 3),
    ],
)
def test_seeds_of_float32_end_apart_by_a_share_of_their_mean(runs, apart):
    assert seed_spread(runs) == pytest.approx(apart)


@pytest.mark.parametrize(("lasts", "ended", "passed"), [(0.0, 0.17, False), (0.06, 0.17, True)])
def test_noise_that_training_takes_away_excuses_nothing_that_stays(lasts, ended, passed):
    """Noise on frequencies near 2**9 pi: 34 % off at first, 0.3 % in the end; bfloat16 17 %."""
    noisy = [(1 + max(lasts, 0.34 - 0.03 * step)) * loss for step, loss in enumerate(FALLING)]
    pair = SeedRun(run(), times(1 + ended), run(noisy))
    found = check_trajectory((pair,), DEFAULT)
    assert found.ratio <= DEFAULT.trajectory_null
    assert found.passed is passed
    if not passed:
        assert found.step == 0  # at no single step is it further away than noise was at first
        assert re.fullmatch(
            r"after 30 steps its loss is 17 % away from float32's, [\d.]+ times as far as small "
            r"noise drives float32, which by then is [\d.]+ % away at single steps",
            found.problem,
        )
