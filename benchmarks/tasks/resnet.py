"""A residual net on 32 x 32 images, with momentum SGD as such nets are trained."""

from collections.abc import Iterator

import torch
from torch import nn


class Block(nn.Module):
    """Two convolutions around which the input is added again."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.skip = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(images) + self.skip(images)
        return out.relu()


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1),
        Block(16, 16, 1),
        Block(16, 32, 2),
        Block(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


def build_data(batch_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    while True:
        yield torch.randn(batch_size, 3, 32, 32), torch.randint(10, (batch_size,))


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets)
