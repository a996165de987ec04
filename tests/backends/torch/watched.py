"""Small trainings for the tests of checks during training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from autoprec import Recipe, apply_profile
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import LossScale

BFLOAT16 = Recipe(policy=Policy.MIXED_BFLOAT16, batch_size=8)
FLOAT16 = Recipe(
    policy=Policy.MIXED_FLOAT16, batch_size=8, loss_scale=LossScale(mode="dynamic", initial=2.0**12)
)

Batches = Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor]]]


def batches(inputs: int = 8, seed: int = 1) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield batches of a regression that a small network learns."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.randn(inputs, 2, generator=generator)
    while True:
        given = torch.randn(8, inputs, generator=generator)
        yield given, torch.tanh(given @ truth)


def train(
    model: nn.Module,
    recipe: Recipe = BFLOAT16,
    *,
    watch: Any = "warn",
    every: int = 3,
    updates: int = 10,
    data: Iterator[tuple[torch.Tensor, torch.Tensor]] | None = None,
    loss_fn: Callable[..., torch.Tensor] = nn.functional.mse_loss,
    optimizer: torch.optim.Optimizer | None = None,
    at_update: Callable[[int], None] = lambda _: None,
) -> tuple[Any, list[float]]:
    """Train for `updates`; return the precision and the losses."""
    optimizer = optimizer or torch.optim.Adam(model.parameters(), lr=0.01)
    precision = apply_profile(
        recipe, model=model, optimizer=optimizer, watch=watch, watch_every=every
    )
    losses = []
    for (inputs, targets), _ in zip(
        data or batches(), range(updates * recipe.accumulation_steps), strict=False
    ):
        loss = loss_fn(precision.forward(inputs), targets)
        precision.backward(loss)
        losses.append(loss.item())
        if precision.step():
            at_update(precision.steps)
    return precision, losses
