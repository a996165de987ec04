"""Segmentation of images: residual encoder, decoder with skips, cross-entropy and Dice together."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

CLASSES, SIDE = 4, 64
CLIP_GRAD_NORM = 1.0


class Residual(nn.Module):
    """Two convolutions with instance norm, around which the input is added."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.InstanceNorm2d(outputs, affine=True) for _ in range(2))
        self.skip = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        out = F.leaky_relu(self.norms[0](self.first(images)), 0.01)
        return F.leaky_relu(self.norms[1](self.second(out)) + self.skip(images), 0.01)


class Segmenter(nn.Module):
    """Three levels down, two up; every level's features are used on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Residual(1, 24), Residual(24, 48, 2), Residual(48, 96, 2)])
        self.up = nn.ModuleList([Residual(96 + 48, 48), Residual(48 + 24, 24)])
        self.head = nn.Conv2d(24, CLASSES, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        levels = []
        for block in self.down:
            images = block(images)
            levels.append(images)
        out = levels.pop()
        for block in self.up:
            other = levels.pop()
            out = F.interpolate(out, size=other.shape[2:], mode="bilinear", align_corners=False)
            out = block(torch.cat([out, other], dim=1))
        logits: torch.Tensor = self.head(out)
        return logits


def build_model() -> nn.Module:
    return Segmenter()


def build_data(batch_size: int) -> Iterator[Mapping[str, torch.Tensor]]:
    rows = torch.arange(SIDE).view(1, SIDE, 1)
    columns = torch.arange(SIDE).view(1, 1, SIDE)
    while True:
        labels = torch.zeros(batch_size, SIDE, SIDE, dtype=torch.long)
        for kind in range(1, CLASSES):
            centre = torch.randint(8, SIDE - 8, (2, batch_size, 1, 1))
            radius = torch.randint(4, 12, (batch_size, 1, 1))
            inside = (rows - centre[0]) ** 2 + (columns - centre[1]) ** 2 < radius**2
            labels[inside] = kind
        images = labels.unsqueeze(1) / CLASSES + 0.3 * torch.randn(batch_size, 1, SIDE, SIDE)
        yield {"image": images, "label": labels}


def training_step(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    logits = model(batch["image"]).float()
    labels = batch["label"]
    chances = logits.softmax(dim=1)
    wanted = F.one_hot(labels, CLASSES).permute(0, 3, 1, 2).float()
    both = (chances * wanted).sum(dim=(2, 3))
    either = chances.sum(dim=(2, 3)) + wanted.sum(dim=(2, 3))
    dice = 1 - ((2 * both + 1e-5) / (either + 1e-5)).mean()
    return F.cross_entropy(logits, labels) + dice


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        model.parameters(), lr=0.01, momentum=0.99, nesterov=True, weight_decay=3e-5
    )
