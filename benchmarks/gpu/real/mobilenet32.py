"""MobileNetV2 on images of 32 pixels at batch 128: so little arithmetic that precision is idle.

37 million operations an image are a tenth of a millisecond of a recent GPU for the whole batch,
while the host takes many times as long to launch the kernels.
"""

from __future__ import annotations

import torch
from synthetic_data import Batches, images, sized
from torch import nn

BATCH_SIZE = sized(128, 8)

PIXELS, CLASSES = 32, 10
FIRST, LAST = sized((32, 1280), (4, 16))
#: Of each stage: expansion, output channels, blocks, stride of the first.
STAGES = sized(
    (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ),
    ((2, 4, 1, 2), (2, 4, 1, 1)),
)


def convolution(
    inputs: int, outputs: int, kernel: int = 1, *, stride: int = 1, groups: int = 1
) -> list[nn.Module]:
    """Return a convolution with BatchNorm and ReLU6."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs), nn.ReLU6(inplace=True)]


class Inverted(nn.Module):
    """A block that widens, convolves each channel by itself, and narrows without a ReLU."""

    def __init__(self, inputs: int, outputs: int, expansion: int, stride: int) -> None:
        super().__init__()
        hidden = expansion * inputs
        widen = convolution(inputs, hidden) if expansion > 1 else []
        each = convolution(hidden, hidden, 3, stride=stride, groups=hidden)
        self.body = nn.Sequential(*widen, *each, *convolution(hidden, outputs)[:2])
        self.adds = stride == 1 and inputs == outputs

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(seen)
        return seen + out if self.adds else out


def mobilenet(classes: int) -> nn.Module:
    """Return the net for so many classes."""
    layers, inputs = convolution(3, FIRST, 3, stride=2), FIRST
    for expansion, outputs, blocks, stride in STAGES:
        for block in range(blocks):
            layers.append(Inverted(inputs, outputs, expansion, 1 if block else stride))
            inputs = outputs
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(LAST, classes)]
    return nn.Sequential(*layers, *convolution(inputs, LAST), *head)


def build_model() -> nn.Module:
    return mobilenet(CLASSES)


def build_data(batch_size: int) -> Batches:
    return images(batch_size, PIXELS, CLASSES)


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=4e-5)
