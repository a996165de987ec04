"""A small U-Net that labels every pixel of 32 x 32 images."""

from collections.abc import Iterator

import torch
from torch import nn


def double(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.GroupNorm(4, outputs),
        nn.SiLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.GroupNorm(4, outputs),
        nn.SiLU(),
    )


class UNet(nn.Module):
    """Down twice, up twice, each way back joined with what was there on the way down."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.bottom = double(3, 16), double(16, 32), double(32, 64)
        self.pool = nn.MaxPool2d(2)
        self.up_second = nn.ConvTranspose2d(64, 32, 2, stride=2)
        self.up_first = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.join_second, self.join_first = double(64, 32), double(32, 16)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        first = self.first(images)
        second = self.second(self.pool(first))
        up = self.up_second(self.bottom(self.pool(second)))
        up = self.up_first(self.join_second(torch.cat([second, up], dim=1)))
        out: torch.Tensor = self.head(self.join_first(torch.cat([first, up], dim=1)))
        return out


def build_model() -> nn.Module:
    return UNet()


def build_data(batch_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    while True:
        yield torch.randn(batch_size, 3, 32, 32), torch.randint(4, (batch_size, 32, 32))


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets)
