"""A MobileNet-like net (depthwise separable convolutions) on digits enlarged to 32 x 32.

Depthwise convolutions move much memory for little arithmetic: here low precision is not sure to
win, and measuring is the only way to know.

    autoprec tune examples/torch/mobilenet.py
    python examples/torch/train_mobilenet.py     # an AMP loop: scaler, clipping, resuming
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

BATCH_SIZE = 64  # the batch trained with: kept
CLIP_GRAD_NORM = 1.0  # training clips the gradient to this norm


def load_split() -> tuple[TensorDataset, TensorDataset]:
    """Return 1437 training and 360 test images as (1 x 32 x 32 in 0..1, class) pairs."""
    digits = load_digits()
    images = torch.tensor(digits.images / 16.0, dtype=torch.float32).unsqueeze(1)
    images = nn.functional.interpolate(images, size=(32, 32), mode="bilinear")
    classes = torch.tensor(digits.target, dtype=torch.int64)
    train, test = train_test_split(
        range(len(classes)), test_size=360, stratify=digits.target, random_state=0
    )
    return TensorDataset(images[train], classes[train]), TensorDataset(images[test], classes[test])


def convolution(
    inputs: int, outputs: int, kernel: int, *, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """Return a convolution with BatchNorm and ReLU6."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(),
    )


def separable(inputs: int, outputs: int, stride: int = 1) -> nn.Sequential:
    """Return a 3 x 3 convolution of each channel by itself, then a 1 x 1 one that mixes them."""
    return nn.Sequential(
        convolution(inputs, inputs, 3, stride=stride, groups=inputs),
        convolution(inputs, outputs, 1),
    )


def build_model() -> nn.Module:
    return nn.Sequential(
        convolution(1, 32, 3, stride=2),
        separable(32, 64),
        separable(64, 128, stride=2),
        separable(128, 128),
        separable(128, 256, stride=2),
        separable(256, 256),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(256, 10),
    )


def build_data(batch_size: int) -> DataLoader:
    train, _ = load_split()
    return DataLoader(train, batch_size=batch_size, shuffle=True, drop_last=len(train) > batch_size)


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


@torch.no_grad()
def evaluate(model: nn.Module) -> float:
    """Return the accuracy on the test images."""
    device = next(model.parameters()).device
    images, classes = load_split()[1].tensors
    model.eval()
    predicted = model(images.to(device)).argmax(1)
    model.train()
    return (predicted == classes.to(device)).float().mean().item()
