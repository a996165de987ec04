"""A small task with dropout and BatchNorm, and its tracer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from autoprec.backends.protocol import Task
from autoprec.backends.shared.tracer import ComparisonTracer
from autoprec.backends.torch.trace.tracer import torch_tracer
from autoprec.core.dtypes import Policy
from autoprec.core.recipe import LossScale, Recipe

FLOAT32 = Recipe(batch_size=8)
BFLOAT16 = Recipe(Policy.MIXED_BFLOAT16, batch_size=8)
FLOAT16 = Recipe(Policy.MIXED_FLOAT16, batch_size=8, loss_scale=LossScale(initial=1024.0))


def data(batch_size: int) -> Any:
    for _ in range(4):
        x = torch.randn(batch_size, 6)
        yield x, x.sum(-1)


def model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 1), nn.Flatten(0)
    )


def task(**changes: Any) -> Task:
    known: dict[str, Any] = {
        "name": "task.py",
        "build_model": model,
        "build_data": data,
        "loss_fn": nn.functional.mse_loss,
    }
    return Task(**(known | changes))


def tracer(**changes: Any) -> ComparisonTracer:
    return torch_tracer(task(**changes), device="cpu", seed=0, report=lambda phase, step: None)
