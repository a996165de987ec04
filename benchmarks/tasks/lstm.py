"""An LSTM over 24 steps."""

from collections.abc import Iterator

import torch
from torch import nn


class Recurrent(nn.Module):
    """Reads a sequence and predicts from its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 128, batch_first=True)
        self.head = nn.Linear(128, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.lstm(inputs)[0][:, -1])
        return out


def build_model() -> nn.Module:
    return Recurrent()


def build_data(batch_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    while True:
        yield torch.randn(batch_size, 24, 32), torch.randint(4, (batch_size,))


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets)
