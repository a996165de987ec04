"""Steps that write to their batch are described and timed on batches as they were drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoprec.backends.protocol import Task
from autoprec.backends.torch.measure.session import TorchSession
from autoprec.core.recipe import Recipe
from autoprec.core.speed.timing_budget import TimingBudget
from tests.backends.torch.described import facts

pytestmark = pytest.mark.torch


class Scaling(nn.Module):
    """Takes its inputs from 0..255 to about 0..1, in place, and keeps their smallest number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.smallest = nn.Linear(4, 1), 1.0

    def forward(self, x: Tensor) -> Tensor:
        x.div_(255.0)
        self.smallest = min(self.smallest, float(x.abs().max()))
        found: Tensor = self.linear(x)
        return found


def pixels(batch_size: int) -> Iterator[Any]:
    while True:
        yield torch.rand(batch_size, 4) * 255.0 + 1.0, torch.randn(batch_size, 1)


def named(batch_size: int) -> Iterator[dict[str, Tensor]]:
    for inputs, targets in pixels(batch_size):
        yield {"inputs": inputs, "labels": targets}


def popping(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Take the labels out of the batch, as what is left goes to the model."""
    labels = batch.pop("labels")
    return F.mse_loss(model(input=batch["inputs"]), labels)


def from_corners(model: nn.Module, batch: Any) -> Tensor:
    """Make widths of corners, in place: a second time they would be something else."""
    inputs, corners = batch
    corners[:, 1] -= corners[:, 0]
    return (corners[:, 1].log() - model(inputs)[:, 0]).square().mean()


def boxes(batch_size: int) -> Iterator[Any]:
    for inputs, _ in pixels(batch_size):
        yield inputs / 256.0, torch.rand(batch_size, 2) + torch.tensor([0.0, 1.5])


WRITING: dict[str, dict[str, Any]] = {
    "the model": {"build_model": Scaling, "build_data": pixels, "loss_fn": F.mse_loss},
    "what is popped": {"build_data": named, "training_step": popping},
    "targets": {"build_data": boxes, "training_step": from_corners},
}


def linear() -> nn.Module:
    return nn.Linear(4, 1)


@pytest.mark.parametrize("given", WRITING.values(), ids=WRITING)
def test_it_is_described_as_any_other(given: dict[str, Any]) -> None:
    found = facts(batch_size=8, **{"build_model": linear, **given})
    assert found.splittable, found.split_reason
    assert found.flops_per_sample == 2 * 2 * 4


@pytest.mark.parametrize("accumulation_steps", [1, 8])
@pytest.mark.parametrize("given", WRITING.values(), ids=WRITING)
def test_it_is_timed_on_the_batches_that_were_drawn(
    given: dict[str, Any], accumulation_steps: int
) -> None:
    built: list[nn.Module] = []

    def build() -> nn.Module:
        make: Callable[[], nn.Module] = given.get("build_model", linear)
        built.append(make())
        return built[-1]

    task = Task("task.py", **{**given, "build_model": build})
    recipe = Recipe(batch_size=8, accumulation_steps=accumulation_steps)
    session = TorchSession(task, recipe, device="cpu", seed=0, report=lambda *_: None)
    measured = session.time_steps(TimingBudget(max_steps=20))
    session.close()
    assert measured.finite
    assert getattr(built[-1], "smallest", 1.0) > 1 / 255
