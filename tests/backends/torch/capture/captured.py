"""Tasks as a user would write them, and the first loss that a task computes at a batch size."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from autoprec.backends.protocol import Task
from autoprec.backends.torch.train.task_runner import (
    batches,
    build_model,
    compute_loss,
    seed_everything,
)

BATCHES = (8, 16, 64)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.2)
        self.last = nn.Linear(16, 3)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(features)).relu()
        return self.last(self.dropout(hidden))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def data(count: int = 256) -> Dataset[Any]:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(count, 6, generator=generator)
    return TensorDataset(features, torch.randint(0, 3, (count,), generator=generator))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.05)


def step(model: Any, batch: Any) -> torch.Tensor:
    features, targets = batch
    return nn.functional.cross_entropy(model(features), targets)


def written_task() -> Task:
    """The task file that does what the captured objects do."""
    return Task(
        name="task.py",
        build_model=net,
        build_data=lambda size: DataLoader(data(), batch_size=size, shuffle=True),
        training_step=step,
        build_optimizer=optimizer_of,
    )


def first_loss(task: Task, batch_size: int, seed: int = 0) -> float:
    """Return the first float32 loss, as a trial at this batch computes it."""
    batch = next(batches(task, batch_size, seed))
    model = build_model(task, "cpu", seed)
    seed_everything(seed)
    return compute_loss(task, model, batch, None).item()


def first(data: Iterable[Any], count: int = 3) -> list[Any]:
    return list(islice(iter(data), count))


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [value.detach().clone() for value in model.state_dict().values()]
