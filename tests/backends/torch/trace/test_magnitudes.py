"""Exponents of a backward pass, and each unit's magnitudes, sparse gradients included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from autoprec.backends.shared.tracer import ComparisonTracer
from autoprec.backends.torch.trace.magnitudes import LargestMagnitudes
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import LossScale, Recipe
from tests.backends.torch.traced import BFLOAT16, FLOAT16, tracer

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("factor", [1.0, 2.0**10, 2.0**-20])
def test_the_largest_exponent_says_at_which_scale_float16_overflows(factor):
    trace = tracer(loss_fn=lambda outputs, targets: factor * ((outputs - targets) ** 2).mean())
    histogram = trace.backward_exponents(recipe=FLOAT16, batches=8)
    assert histogram.finite
    assert histogram.batches == 8
    assert sum(histogram.counts.values()) == pytest.approx(1.0)
    safe = 15 - histogram.largest
    for exponent, skips in ((safe - 4, False), (safe + 3, True)):
        recipe = Recipe(Policy.MIXED_FLOAT16, 8, loss_scale=LossScale(initial=2.0**exponent))
        assert bool(trace.trajectory(recipe=recipe, seed=0, steps=1).skipped) is skips


def test_infinite_gradients_are_told_apart_from_large_ones():
    trace = tracer(loss_fn=lambda outputs, targets: outputs.sum() * 1e38 * 1e38)
    assert not trace.backward_exponents(recipe=FLOAT16, batches=1).finite


def test_every_unit_has_its_magnitudes():
    traces = {t.path: t for t in tracer().unit_magnitudes(recipe=FLOAT16)}
    assert {"0", "1", "2", "3", "4"} <= traces.keys()
    assert -8 < traces["0"].forward_largest < 8
    assert traces["0"].backward_largest < 8
    assert 0.0 <= traces["0"].underflow <= 1.0


def bag_trace(*, sparse: bool) -> ComparisonTracer:
    def build() -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(32, 8, sparse=sparse), nn.Linear(8, 4))

    def words(batch_size: int) -> Any:
        for _ in range(4):
            x = torch.randint(16, (batch_size, 6))
            yield x, x.sum(-1) % 4

    return tracer(
        build_model=build,
        build_data=words,
        loss_fn=nn.functional.cross_entropy,
        build_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    )


def test_sparse_gradients_are_compared_as_dense_ones_are():
    found = []
    for sparse in (True, False):
        trace = bag_trace(sparse=sparse)
        trace.reference(batch_size=8, steps=3, checkpoints=(0, 2))
        found.append(
            (
                trace.compare_steps(recipe=BFLOAT16),
                trace.noise(draws=1),
                trace.backward_exponents(recipe=FLOAT16, batches=2),
                trace.unit_magnitudes(recipe=FLOAT16),
            )
        )
    of_sparse, of_dense = found
    assert all(point.gradient_error > 0 for point in of_sparse[0] + of_sparse[1])
    for sparse, dense in zip(of_sparse[0] + of_sparse[1], of_dense[0] + of_dense[1], strict=True):
        assert sparse.loss == dense.loss
        # Both are shares of float32 gradients, whose sums are rounded in another order.
        assert sparse.gradient_error == pytest.approx(dense.gradient_error, rel=0, abs=2.0**-24)
    assert of_sparse[2].counts == pytest.approx(of_dense[2].counts)
    assert of_sparse[3] == of_dense[3]


class Derived(nn.Module):
    """Returns its value with a derivative by its inputs, in forward mode."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value, derivative = torch.func.jvp(self.net, (x,), (torch.ones_like(x),))
        found: torch.Tensor = (value + derivative).flatten()
        return found


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_derivatives_in_forward_mode_are_read(dtype: torch.dtype) -> None:
    """Their backward pass holds zeros without memory, over which torch crashed."""
    model, mode = Derived(), LargestMagnitudes(dtype)
    with torch.autocast("cpu", dtype):
        loss = model(torch.randn(8, 6)).float().square().mean()
    with mode:
        loss.backward()
    largest, overflowed = mode.summary()
    assert largest
    assert not overflowed
