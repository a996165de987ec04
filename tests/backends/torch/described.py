"""A small task, and what one float32 step of it shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from autoprec.backends.protocol import Task
from autoprec.backends.torch.backend import TorchBackend
from autoprec.core.measurement import TaskFacts


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))


def pairs(batch_size: int) -> Iterator[Any]:
    while True:
        yield torch.randn(batch_size, 4), torch.randn(batch_size, 1)


def task(**changes: Any) -> Task:
    known = {"name": "task.py", "build_model": small, "build_data": pairs}
    if "training_step" not in changes:
        known["loss_fn"] = F.mse_loss
    return Task(**(known | changes))


def facts(batch_size: int = 32, **changes: Any) -> TaskFacts:
    given = task(**changes)
    return TorchBackend().describe(
        given, device="cpu", seed=0, batch_size=batch_size, report=lambda *_: None
    )
