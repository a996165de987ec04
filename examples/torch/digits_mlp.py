"""A small dense net on scikit-learn's digits: 1797 images of 8 x 8, ten classes.

A step takes about a millisecond, nearly all of it overhead: the honest answer is often float32.

    autoprec tune examples/torch/digits_mlp.py
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = 64  # the batch trained with: kept


def load_split() -> tuple[TensorDataset, TensorDataset]:
    """Return 1437 training and 360 test images as (float32 in 0..1, class) pairs."""
    digits = load_digits()
    images = torch.tensor(digits.data / 16.0, dtype=torch.float32)
    classes = torch.tensor(digits.target, dtype=torch.int64)
    train, test = train_test_split(
        range(len(classes)), test_size=360, stratify=digits.target, random_state=0
    )
    return TensorDataset(images[train], classes[train]), TensorDataset(images[test], classes[test])


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, 10),
    )


def build_data(batch_size: int) -> DataLoader:
    train, _ = load_split()
    return DataLoader(train, batch_size=batch_size, shuffle=True, drop_last=len(train) > batch_size)


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@torch.no_grad()
def evaluate(model: nn.Module) -> float:
    """Return the accuracy on the test images."""
    device = next(model.parameters()).device
    images, classes = load_split()[1].tensors
    model.eval()
    predicted = model(images.to(device)).argmax(1)
    model.train()
    return (predicted == classes.to(device)).float().mean().item()
