"""The fused_optimizer knob: it trains the same, and says what cannot be fused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autoprec.core.recipe import Recipe
from tests.backends.torch.operated import (
    FLOAT16,
    FLOAT32,
    apply,
    batches,
    mlp,
    train,
    weights,
)

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("recipe", [FLOAT32, FLOAT16])
def test_a_fused_optimizer_trains_the_same(recipe: Recipe) -> None:
    plain, fused = mlp(), mlp()
    data = batches(3)
    for model, knobs in ((plain, {}), (fused, {"fused_optimizer": True})):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        precision = apply(replace(recipe, knobs=knobs), model, optimizer)
        planted = (1,) if recipe is FLOAT16 else ()
        assert train(precision, model, data, overflow_at=planted) == [True, not planted, True]
    for ours, theirs in zip(weights(fused), weights(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_an_optimizer_that_cannot_be_fused_is_said() -> None:
    model = mlp()
    optimizer = torch.optim.RMSprop(model.parameters())
    precision = apply(replace(FLOAT32, knobs={"fused_optimizer": True}), model, optimizer)
    assert [s.path for s in precision.report.skipped] == ["RMSprop"]
