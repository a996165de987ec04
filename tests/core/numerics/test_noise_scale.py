"""The noise scale is found from pairs of gradients whose noise is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autoprec.core.numerics.noise_scale import NoiseScale, noise_scale, noise_share

SIZE = 100_000


def share_of_pair(random: np.random.Generator, true_scale: float, batch: int) -> float | None:
    """Return the share of two gradients of length 1 with the noise of a batch."""
    deviation = math.sqrt(true_scale / batch / SIZE)
    gradient = random.normal(size=SIZE) / math.sqrt(SIZE)
    one, other = (gradient + random.normal(size=SIZE) * deviation for _ in range(2))
    difference = float(np.linalg.norm(one - other))
    return noise_share(
        difference / float(np.linalg.norm(one)), difference / float(np.linalg.norm(other))
    )


@pytest.mark.parametrize("true_scale", [4.0, 32.0, 200.0])
@pytest.mark.parametrize("batch", [8, 64])
def test_the_scale_of_known_noise_is_found_at_any_batch(true_scale: float, batch: int) -> None:
    random = np.random.default_rng(0)
    shares = [(step, share_of_pair(random, true_scale, batch)) for step in (0, 2, 8, 29)]
    found = noise_scale(shares, batch)
    assert found is not None
    assert found.at == pytest.approx(true_scale, rel=0.15)
    assert found.low is not None
    assert found.at is not None
    assert found.low <= found.at
    assert (found.first_step, found.last_step, found.batch) == (0, 29, batch)


def test_gradients_that_are_the_same_or_not_finite_say_nothing() -> None:
    assert noise_share(0.0, 0.0) is None
    assert noise_share(None, 1.0) is None
    assert noise_share(1.0, None) is None
    assert noise_scale([(0, None), (2, 0.5)], 8) is None


def test_nothing_but_noise_has_no_scale() -> None:
    """Gradients that are at right angles, or turn against each other."""
    assert noise_share(math.sqrt(2), math.sqrt(2)) == pytest.approx(1.0)
    assert noise_scale([(0, 1.0), (2, 1.2)], 8) == NoiseScale(None, None, None, 8, 0, 2)
    assert noise_scale([(0, 0.5), (2, 1.2)], 8) == NoiseScale(
        pytest.approx(45.33, rel=1e-3), 8.0, None, 8, 0, 2
    )


def test_a_larger_batch_needs_at_most_the_samples_by_the_least_of_the_range() -> None:
    found = NoiseScale(at=100.0, low=64.0, high=200.0, batch=32)
    assert found.samples_needed(256, 32) == pytest.approx(320 / 96)
    assert found.samples_needed(32, 32) == 1.0
    assert NoiseScale(None, None, None, 32).samples_needed(256, 32) == 1.0


def test_samples_grow_with_the_batch_over_the_scale() -> None:
    found = NoiseScale(at=100.0, low=64.0, high=200.0, batch=32)
    assert found.samples_factor(300) == 4.0
    assert NoiseScale(None, 64.0, None, 32).samples_factor(300) == 1.0
    none = NoiseScale(0.0, 0.0, 0.0, 32)
    assert none.samples_factor(64) / none.samples_factor(32) == pytest.approx(2.0)
