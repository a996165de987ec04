"""Curves for looking at: means over stretches of steps, of the longest run."""

from __future__ import annotations

import pytest

from autoprec.core.numerics.loss_curves import POINTS, SeedRun, sample_curves
from autoprec.core.numerics.traces import Trajectory


def run(losses: list[float | None]) -> Trajectory:
    return Trajectory(tuple(losses))


def test_short_runs_are_kept_step_by_step() -> None:
    curves = sample_curves([SeedRun(run([3.0, 2.0, 1.0]), run([3.0, 2.5, None]), run([3.0, 2.1]))])
    assert curves is not None
    assert curves.steps == (0, 1, 2)
    assert curves.float32 == (3.0, 2.0, 1.0)
    assert curves.candidate == (3.0, 2.5, None)
    assert curves.noise == (3.0, 2.1)


@pytest.mark.parametrize("steps", [41, 60, 97, 480])
def test_long_runs_become_means_that_cover_every_step_once(steps: int) -> None:
    losses = [float(index) for index in range(steps)]
    curves = sample_curves([SeedRun(run(losses), run(losses))])
    assert curves is not None
    assert len(curves.steps) == POINTS
    assert curves.steps[-1] == steps - 1
    begins = [0, *(step + 1 for step in curves.steps[:-1])]
    means = [(b + e) / 2 for b, e in zip(begins, curves.steps, strict=True)]
    assert curves.float32 == pytest.approx(means, rel=1e-4)
    assert curves.noise == ()


def test_the_longest_run_is_shown_with_what_noise_did_to_any() -> None:
    short = SeedRun(run([2.0] * 5), run([2.0] * 5), run([2.0] * 5))
    long = SeedRun(run([1.0] * 9), run([1.5] * 9))
    curves = sample_curves([long, short])
    assert curves is not None
    assert curves.steps[-1] == 8
    assert curves.candidate == (1.5,) * 9
    assert curves.noise == (2.0,) * 5


def test_a_run_that_stopped_early_ends_both_curves() -> None:
    curves = sample_curves([SeedRun(run([1.0] * 9), run([1.0] * 4))])
    assert curves is not None
    assert curves.steps == (0, 1, 2, 3)


def test_without_a_training_there_are_none() -> None:
    assert sample_curves([]) is None
    assert sample_curves([SeedRun(run([]), run([]))]) is None
