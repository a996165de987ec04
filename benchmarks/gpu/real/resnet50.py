"""ResNet-50 (v1.5) at 224 pixels: the most published training benchmark that there is."""

from __future__ import annotations

import torch
from synthetic_data import Batches, images, sized
from torch import nn

BATCH_SIZE = sized(256, 8)

PIXELS, CLASSES, WIDTH = sized((224, 1000, 64), (32, 10, 4))
DEPTHS = sized((3, 4, 6, 3), (1, 1, 1, 1))
EXPANSION = 4


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    """Return a convolution without bias, and its BatchNorm."""
    padding = kernel // 2
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut; the 3 x 3 one has the stride."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.body = nn.Sequential(
            *convolution(inputs, width, 1),
            nn.ReLU(inplace=True),
            *convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *convolution(width, outputs, 1),
        )
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Sequential(*([] if same else convolution(inputs, outputs, 1, stride)))

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.body(seen) + self.shortcut(seen))


def build_model() -> nn.Module:
    layers = [*convolution(3, WIDTH, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    inputs = WIDTH
    for stage, depth in enumerate(DEPTHS):
        width = WIDTH * 2**stage
        for block in range(depth):
            layers.append(Bottleneck(inputs, width, 2 if stage and not block else 1))
            inputs = EXPANSION * width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES)]
    return nn.Sequential(*layers, *head)


def build_data(batch_size: int) -> Batches:
    return images(batch_size, PIXELS, CLASSES)


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
