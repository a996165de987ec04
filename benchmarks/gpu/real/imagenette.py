"""Three strided convolutions of 5, 7 and 11 pixels on images of 256: where AMP once brought 1.1x.

The net of an article on mixed precision in R (2020), measured there on a V100, a Titan XP and a
Quadro M2200 at batches of 32 to 512. There is no BATCH_SIZE, so `--grid --batch-sizes 32-512`
prints the article's table.
"""

from __future__ import annotations

import torch
from synthetic_data import Batches, images, sized
from torch import nn

PIXELS, CLASSES = sized(256, 16), 10
CHANNELS = sized((32, 64, 128), (4, 4, 8))
KERNELS = (5, 7, 11)


def build_model() -> nn.Module:
    layers: list[nn.Module] = []
    inputs = 3
    for outputs, kernel in zip(CHANNELS, KERNELS, strict=True):
        layers += [nn.Conv2d(inputs, outputs, kernel, 2, kernel // 2), nn.ReLU()]
        layers += [nn.BatchNorm2d(outputs)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


def build_data(batch_size: int) -> Batches:
    return images(batch_size, PIXELS, CLASSES)


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)
