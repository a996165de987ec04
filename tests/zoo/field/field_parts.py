"""What the tasks in the shapes of real code share: seeded batches, fixed teachers, an MLP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn


def batches(batch_size: int, make: Callable[[int], Any], count: int = 300) -> Iterator[Any]:
    """Yield `count` batches of `make(batch_size)`, drawn from torch's global generator."""
    for _ in range(count):
        yield make(batch_size)


def fixed(*shape: int, seed: int = 5) -> torch.Tensor:
    """Normal numbers that are the same in every run."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def smooth(x: torch.Tensor, seed: int = 5) -> torch.Tensor:
    """Return a smooth function of the rows of `x`, of about unit size."""
    hidden = torch.tanh(x @ fixed(x.shape[-1], 6, seed=seed))
    return hidden @ fixed(6, seed=seed + 1) / 2


def perceptron(inputs: int, hidden: int, outputs: int, act: type[nn.Module] = nn.Tanh) -> nn.Module:
    """Return a network of two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, hidden),
        act(),
        nn.Linear(hidden, hidden),
        act(),
        nn.Linear(hidden, outputs),
    )
