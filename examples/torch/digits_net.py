"""The task of train_before.py: its model, data, loss and optimizer, as `autoprec tune` reads them.

autoprec tune examples/torch/digits_net.py
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = 64
CLIP_GRAD_NORM = 1.0


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 128),
        nn.LayerNorm(128),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def build_data(batch_size: int) -> Iterable[list[torch.Tensor]]:
    pixels, digits = load_digits(return_X_y=True)
    inputs = torch.tensor(pixels / 16 - 0.5, dtype=torch.float32)
    dataset = TensorDataset(inputs, torch.tensor(digits))
    return DataLoader(dataset, batch_size=batch_size, shuffle=True)


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets, label_smoothing=0.1)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)
