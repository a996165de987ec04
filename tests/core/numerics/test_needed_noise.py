"""Noise: measured only where a test fails without it, and never what turns a verdict down."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoprec.core.numerics.judging import judge
from autoprec.core.numerics.loss_curves import SeedRun
from autoprec.core.numerics.needed_noise import (
    needs_noise_at_checkpoints,
    needs_noisy_long_runs,
    needs_noisy_trainings,
)
from autoprec.core.numerics.traces import BufferUpdate, NoisyStep, StepComparison
from autoprec.core.numerics.verdict import ProofEvidence
from tests.core.evidence import DEFAULT, FALLING, drifting, points, run, times
from tests.core.numerics.test_error_floor import QUIET, SHORTER, comparisons_at

PAIR = SeedRun(run(), times(1.002))
GOOD = ProofEvidence(points(0.003), runs=(PAIR,), float32_losses=FALLING)
WILD = tuple(NoisyStep(step, 2.001, 2.0, 0.6) for step in (0, 2, 8, 29))


def test_what_passes_every_test_needs_no_noise_and_its_verdict_says_so():
    assert not needs_noise_at_checkpoints(GOOD, DEFAULT)
    assert not needs_noisy_trainings(GOOD, DEFAULT)
    found = judge(GOOD, DEFAULT)
    assert found.accepted
    assert (found.loss_null, found.gradient_null, found.trajectory_ratio) == (None, None, None)


def with_buffers(*errors: float) -> ProofEvidence:
    made = [
        replace(point, buffers=(BufferUpdate("mean", error),))
        for point, error in zip(points(0.003)[-len(errors) :], errors, strict=True)
    ]
    return replace(GOOD, comparisons=tuple(made))


FLOOR = comparisons_at(lambda loss: 1e-3)


@pytest.mark.parametrize(
    "evidence",
    [
        replace(GOOD, comparisons=points(0.03)),
        replace(GOOD, comparisons=points(0.003, 0.7)),
        with_buffers(0.4, 0.4),
        with_buffers(0.1, 0.4),  # at one of the checkpoints: to be named, if noise does not do it
        ProofEvidence(FLOOR[:2], runs=(SHORTER,), late_comparisons=FLOOR[2:]),
    ],
)
def test_what_fails_at_the_same_weights_needs_noise_there_once(evidence):
    assert needs_noise_at_checkpoints(evidence, DEFAULT)
    assert not needs_noise_at_checkpoints(replace(evidence, noise=QUIET), DEFAULT)


def test_a_loss_that_is_not_finite_is_excused_by_nothing():
    broken = replace(GOOD, comparisons=(*points(0.03), StepComparison(59, None, 2.0, None)))
    assert not needs_noise_at_checkpoints(broken, DEFAULT)
    leaves = replace(broken, runs=(SeedRun(run(), drifting(0.01)),))
    assert not needs_noisy_trainings(leaves, DEFAULT)


LEAVES = replace(GOOD, runs=(SeedRun(run(), drifting(0.01)),))
NEAR = points(0.012)
SCORED = SeedRun(run(metric=0.9), replace(times(1.002), metric=0.8))


@pytest.mark.parametrize(
    ("evidence", "needed"),
    [
        (LEAVES, True),
        (replace(LEAVES, noise=WILD), False),  # such noise excuses nothing
        (replace(GOOD, runs=(SCORED,)), True),
        (replace(GOOD, comparisons=NEAR), False),  # close, so that it clears what is near
        (replace(GOOD, comparisons=NEAR, runs=(SeedRun(run(), times(1.02)),)), True),
        (replace(GOOD, runs=(SeedRun(run(), run([*FALLING[:-1], None])),)), False),
        (replace(GOOD, runs=(SeedRun(run(FALLING * 2), drifting(0.01)),)), False),  # 60 steps
        (replace(GOOD, runs=()), False),
    ],
)
def test_trainings_need_noise_where_it_might_excuse_them(evidence, needed):
    assert needs_noisy_trainings(evidence, DEFAULT) is needed


def test_a_noisy_training_is_not_asked_for_twice():
    noisy = replace(LEAVES, runs=(SeedRun(run(), drifting(0.01), times(1.0001)),))
    assert not needs_noisy_trainings(noisy, DEFAULT)


@pytest.mark.parametrize(("away", "needed"), [(1.01, False), (1.07, True), (1.2, True)])
def test_long_runs_need_noise_where_they_lean_or_leave(away, needed):
    both = tuple(SeedRun(run(FALLING * 4, seed=seed), times(away, FALLING * 4)) for seed in (0, 1))
    assert needs_noisy_long_runs(replace(GOOD, long_runs=both), DEFAULT) is needed


SHARES = st.floats(-0.2, 0.2)
ERRORS = st.floats(0.0, 2.0)


@given(
    single=st.lists(st.tuples(SHARES, ERRORS, ERRORS), min_size=4, max_size=4),
    noisy=st.lists(st.tuples(SHARES, ERRORS, ERRORS), min_size=4, max_size=4),
    candidates=st.lists(st.tuples(SHARES, SHARES), min_size=1, max_size=2),
    perturbed=SHARES,
    roundoff=st.sampled_from([2.0**-8, 2.0**-11]),
)
def test_noise_turns_no_accepted_verdict_down(single, noisy, candidates, perturbed, roundoff):
    steps = (0, 2, 8, 29)
    comparisons = tuple(
        StepComparison(step, 2.0 * (1 + off), 2.0, error, buffers=(BufferUpdate("mean", moved),))
        for step, (off, error, moved) in zip(steps, single, strict=True)
    )
    noise = tuple(
        NoisyStep(step, 2.0 * (1 + off), 2.0, error, buffers=(BufferUpdate("mean", moved),))
        for step, (off, error, moved) in zip(steps, noisy, strict=True)
    )
    runs = tuple(
        SeedRun(run(), run(loss * (1 + a + b * i / 30) for i, loss in enumerate(FALLING)))
        for a, b in candidates
    )
    without = ProofEvidence(comparisons, runs=runs, float32_losses=FALLING, roundoff=roundoff)
    if judge(without, DEFAULT).accepted:
        more = (replace(runs[0], noisy=times(1 + perturbed)), *runs[1:])
        assert judge(replace(without, noise=noise, runs=more), DEFAULT).accepted
