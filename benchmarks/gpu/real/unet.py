"""A U-Net that begins with 64 channels, at 256 pixels: few parameters, much arithmetic."""

from __future__ import annotations

import itertools

import torch
from synthetic_data import Batches, masks, sized
from torch import nn

BATCH_SIZE = sized(32, 2)

PIXELS, WIDTH, DEPTH = sized((256, 64, 4), (16, 4, 2))


def twice(inputs: int, outputs: int) -> nn.Sequential:
    """Return two 3 x 3 convolutions, each with BatchNorm and ReLU."""
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False)]
        layers += [nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Halves the image and doubles the channels `DEPTH` times, and goes back up."""

    def __init__(self) -> None:
        super().__init__()
        widths = [WIDTH * 2**level for level in range(DEPTH + 1)]
        pairs = list(itertools.pairwise(widths))
        self.first = twice(3, WIDTH)
        self.down = nn.ModuleList(twice(narrow, wide) for narrow, wide in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(wide, narrow, 2, 2) for narrow, wide in pairs)
        self.joined = nn.ModuleList(twice(wide, narrow) for narrow, wide in pairs)
        self.head = nn.Conv2d(WIDTH, 1, 1)

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        levels = [self.first(seen)]
        for down in self.down:
            levels.append(down(nn.functional.max_pool2d(levels[-1], 2)))
        hidden = levels.pop()
        for up, joined in zip(reversed(self.up), reversed(self.joined), strict=True):
            hidden = joined(torch.cat([levels.pop(), up(hidden)], dim=1))
        out: torch.Tensor = self.head(hidden)
        return out


def build_model() -> nn.Module:
    return UNet()


def build_data(batch_size: int) -> Batches:
    return masks(batch_size, PIXELS)


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(outputs, targets)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4)
