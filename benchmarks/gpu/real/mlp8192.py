"""The MLP of TensorFlow's guide to mixed precision, 784-4096-4096-10, at its batch of 8192.

The guide expects no gain on GPUs of compute capability 8.0 or newer, for TensorFlow computes
float32 products in TF32 there; PyTorch does not by default.
"""

from __future__ import annotations

import torch
from synthetic_data import Batches, sized, vectors
from torch import nn

BATCH_SIZE = sized(8192, 16)

WIDTH = sized(4096, 64)


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        nn.Linear(WIDTH, 10),
    )


def build_data(batch_size: int) -> Batches:
    return vectors(batch_size, 784, 10)


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=1e-4)
