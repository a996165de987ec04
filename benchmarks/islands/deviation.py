"""Wide layers around a deviation computed as E[x^2] - E[x]^2 of numbers near 30."""

import torch
from torch import nn

BATCH_SIZE = 256


class Standardize(nn.Module):
    """Subtracts the mean and divides by the deviation, in the way that cancels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x * x).mean(-1, keepdim=True) - mean * mean
        return (x - mean) / (variance.clamp(min=1e-3)).sqrt()


class Net(nn.Module):
    """Hidden layers, an offset, and the standardisation between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024))
        self.standardize = Standardize()
        self.last = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.standardize(self.first(x) + 30.0))
        return out


def build_model() -> nn.Module:
    return Net()


def build_data(batch_size):  # type: ignore[no-untyped-def]
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(64, 10, generator=generator)
    while True:
        x = torch.randn(batch_size, 64)
        yield x, (x @ directions).argmax(-1)


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets)
