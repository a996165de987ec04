"""What the tasks of the zoo share: batches from the seeded generator, fixed teachers, optimizers.

A task's data differ with the seed, what is to be learned does not: targets come from teachers of a
generator of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


def batches(batch_size: int, make: Callable[[int], Any], count: int = 256) -> Iterator[Any]:
    """Yield `count` batches of `make(batch_size)`, drawn from torch's global generator."""
    for _ in range(count):
        yield make(batch_size)


def teacher(*shape: int, seed: int = 11) -> torch.Tensor:
    """Return a fixed random matrix with columns of norm about one."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) / shape[0] ** 0.5


def smooth(x: torch.Tensor, outputs: int = 1, seed: int = 11) -> torch.Tensor:
    """Return a smooth function of `x` that a small network can learn."""
    return torch.tanh(1.5 * (x @ teacher(x.shape[-1], 6, seed=seed))) @ teacher(6, outputs, seed=3)


def labels(x: torch.Tensor, classes: int = 4, seed: int = 11) -> torch.Tensor:
    """Return the class that a fixed linear teacher gives `x`."""
    return (x @ teacher(x.shape[-1], classes, seed=seed)).argmax(-1)


def adam(model: nn.Module, rate: float = 5e-3) -> torch.optim.Optimizer:
    """Return Adam for all of a model's parameters."""
    return torch.optim.Adam(model.parameters(), lr=rate)
