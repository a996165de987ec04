"""Trajectories and the user's metric, against float32's and what noise does to it."""

from __future__ import annotations

import pytest

from autoprec.core.judge import (
    Evidence,
    SeedRun,
    judge,
    metric,
    trajectory,
)
from tests.core.evidence import DEFAULT, FALLING, drifting, run, times


def test_chaos_that_noise_causes_too_is_not_blamed_on_the_precision():
    chaotic = SeedRun(run(), drifting(0.02), drifting(-0.015))
    assert trajectory((chaotic,), DEFAULT).passed


def test_noise_that_breaks_float32_excuses_everything_finite():
    broken = SeedRun(run(), drifting(0.02), run((*FALLING[:10], None, *FALLING[11:])))
    assert trajectory((broken,), DEFAULT).passed


def test_without_a_noisy_run_only_the_slack_is_allowed():
    check = trajectory((SeedRun(run(), drifting(0.02)),), DEFAULT)
    assert not check.passed
    assert check.noise == 0.0


def test_a_trajectory_of_less_than_five_steps_is_not_judged():
    assert not trajectory((SeedRun(run(), run(FALLING[:4])),), DEFAULT).judged


def test_the_users_metric_is_compared_over_seeds():
    good = [SeedRun(run(metric=0.9), run(metric=0.89), run(metric=0.88)) for _ in range(2)]
    bad = [SeedRun(run(metric=0.9), run(metric=0.7), run(metric=0.9)) for _ in range(2)]
    assert metric(good, DEFAULT).passed
    assert "0.7" in metric(bad, DEFAULT).problem
    assert judge(Evidence(runs=tuple(bad)), DEFAULT).verdict == "rejected"
    assert "evaluate(model)" in judge(Evidence(runs=tuple(good)), DEFAULT).covered


def test_metrics_after_different_numbers_of_steps_are_not_compared():
    assert not metric([SeedRun(run(metric=0.9), run(FALLING[:9], metric=0.1))], DEFAULT).judged


@pytest.mark.parametrize(("lasts", "ended", "passed"), [(0.0, 0.17, False), (0.06, 0.17, True)])
def test_noise_that_training_takes_away_excuses_nothing_that_stays(lasts, ended, passed):
    """Noise on frequencies near 2**9 pi: 34 % off at first, 0.3 % in the end; bfloat16 17 %."""
    noisy = [(1 + max(lasts, 0.34 - 0.03 * step)) * loss for step, loss in enumerate(FALLING)]
    pair = SeedRun(run(), times(1 + ended), run(noisy))
    found = trajectory((pair,), DEFAULT)
    assert found.ratio <= DEFAULT.trajectory_null
    assert found.passed is passed
    assert passed or "by then is" in found.problem
