"""The batch of the most goodput is where the rate gains no more than the samples lose."""

from __future__ import annotations

import math

import pytest

from autoprec.core.numerics.noise_scale import NoiseScale
from autoprec.core.speed.goodput import goodput_batch
from autoprec.core.speed.space import BATCH, powers_of_two
from autoprec.core.speed.trial_results import Outcome, Status
from tests.core.speed.machines import at, measured, true_rate
from tests.core.speed.test_ladder import fed

#: Float32 at every batch; the leader at one of them only.
RAN = [measured(at(size), true_rate(at(size))) for size in (8, 16, 32, 64, 128, 256, 512)]
LEADER = measured(at(512, "mixed_bfloat16"), true_rate(at(512, "mixed_bfloat16")))
HISTORY = [*RAN, LEADER]


def best(history: list[Outcome], scale: NoiseScale, ranks: int = 1) -> int:
    return goodput_batch(powers_of_two(8, 4096), history, LEADER, scale, ranks)


def scale(samples: float | None) -> NoiseScale:
    return NoiseScale(samples, samples, samples, 32)


@pytest.mark.parametrize("noise", [2.0, 32.0, 128.0, 512.0, 2048.0])
def test_it_is_the_mean_of_the_noise_and_the_batch_of_half_the_speed(noise: float) -> None:
    """Samples a second are b / (b + 32), samples needed 1 + b / N: the most is at sqrt(32 N)."""
    assert best(HISTORY, scale(noise)) == math.sqrt(32 * noise)


def test_noise_beyond_all_batches_leaves_the_most_samples_a_second() -> None:
    assert best(HISTORY, scale(None)) == 512


def test_gradients_without_noise_want_the_smallest_batch() -> None:
    assert best(HISTORY, scale(0.0)) == 8


def test_the_loader_ends_what_a_larger_batch_gains() -> None:
    """It feeds what bfloat16 trains at batch 32."""
    slow = [fed(outcome, 1000.0) for outcome in HISTORY]
    assert best(slow, scale(2048.0)) in (32, 64)
    assert best(HISTORY, scale(2048.0)) == 256


def test_a_batch_that_did_not_run_is_none() -> None:
    failed = Outcome({**LEADER.point, BATCH: 1024}, Status.OUT_OF_MEMORY)
    assert best([*HISTORY, failed], scale(None)) == 512


def test_a_batch_that_was_not_tried_is_as_fast_as_predicted() -> None:
    larger = [outcome for outcome in HISTORY if outcome.point[BATCH] != 16]
    assert best(larger, scale(8.0)) == 16


def test_the_batch_of_all_ranks_counts() -> None:
    assert best(HISTORY, scale(512.0), ranks=4) == 64
