"""A small convolutional net with BatchNorm on scikit-learn's digits: 8 x 8 images, ten classes.

autoprec tune examples/torch/digits_conv.py
python examples/torch/train_digits.py        # trains with the profile, beside float32
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = 128  # the batch trained with: kept


def load_split() -> tuple[TensorDataset, TensorDataset]:
    """Return 1437 training and 360 test images as (float32 in 0..1, class) pairs."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16.0, dtype=torch.float32).unsqueeze(1)
    classes = torch.tensor(digits.target, dtype=torch.int64)
    train, test = train_test_split(
        range(len(classes)), test_size=360, stratify=digits.target, random_state=0
    )
    return TensorDataset(images[train], classes[train]), TensorDataset(images[test], classes[test])


def convolution(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """Return a 3 x 3 convolution with BatchNorm and ReLU."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


def build_model() -> nn.Module:
    return nn.Sequential(
        convolution(1, 64),
        convolution(64, 128),
        convolution(128, 256, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
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
