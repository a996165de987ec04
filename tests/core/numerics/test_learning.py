"""Whether a float32 run learned anything, by its curve and the noise between its batches."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from autoprec.core.numerics.judging import judge
from autoprec.core.numerics.learning import LEAST_STEPS, has_learned
from autoprec.core.numerics.loss_curves import SeedRun
from autoprec.core.numerics.verdict import NOTHING_LEARNED
from tests.core.evidence import DEFAULT, evidence, run


def noisy(losses, size, seed=0):
    draw = random.Random(seed)
    return tuple(loss + size * draw.gauss(0.0, 1.0) for loss in losses)


FALLING = tuple(2.0 * 0.95**step for step in range(30))
FLAT = (0.694,) * 30


@pytest.mark.parametrize(
    "losses",
    [
        FALLING,
        noisy(FALLING, 0.1),
        tuple(loss - 5.0 for loss in FALLING),  # a log-likelihood
        tuple(0.694 - 0.002 * step for step in range(30)),  # slowly, but without noise
        tuple(100.0 + loss for loss in FALLING),  # above a constant
        FALLING[:LEAST_STEPS],
    ],
)
def test_a_loss_that_falls_shows_learning(losses):
    assert has_learned(losses)


@pytest.mark.parametrize(
    "losses",
    [
        FLAT,
        tuple(0.694 + 0.0003 * step for step in range(30)),  # warm-up: it even rises
        tuple(0.6931 - 0.00002 * step for step in range(30)),  # falls, but by nothing
        noisy(FLAT, 0.02),
        noisy(tuple(0.694 - 0.0005 * step for step in range(30)), 0.05, seed=3),
        (0.0,) * 30,
        FLAT[:LEAST_STEPS],
    ],
)
def test_a_loss_that_does_not_fall_by_more_than_chance_shows_none(losses):
    assert not has_learned(losses)


@pytest.mark.parametrize(
    ("size", "learned"), [(0.01, True), (0.3, False)], ids=["small batches' noise", "large"]
)
def test_a_fall_is_measured_by_the_noise_between_batches(size, learned):
    fall = tuple(1.0 - 0.1 * step / 29 for step in range(30))
    alternating = tuple(loss + (size if step % 2 else -size) for step, loss in enumerate(fall))
    assert has_learned(alternating) is learned


def test_what_is_too_short_or_not_finite_is_not_doubted():
    assert has_learned(FLAT[: LEAST_STEPS - 1])
    assert has_learned((*FLAT, None))
    assert has_learned((*FLAT, math.nan))
    assert has_learned(())


def test_a_verdict_over_steps_without_learning_says_so():
    flat = run(noisy(FLAT, 0.001))
    found = replace(evidence(flat), runs=(SeedRun(flat, flat),))
    told = judge(found, DEFAULT)
    assert told.accepted
    assert told.caveat == NOTHING_LEARNED
    assert f"; {NOTHING_LEARNED}" in told.reason
    trained = judge(replace(found, start="step 5000"), DEFAULT)
    assert trained.caveat == ""
    assert NOTHING_LEARNED not in trained.reason
    assert judge(evidence(run()), DEFAULT).caveat == ""
