"""A wide net behind sine features of times up to 4000: bfloat16 cannot tell the times apart."""

import torch
from torch import nn

BATCH_SIZE = 256


class Waves(nn.Module):
    """Sines and cosines of the time, by a matrix product with the frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.linspace(0.1, 1.5, 32).unsqueeze(0))

    def forward(self, times: torch.Tensor) -> torch.Tensor:
        angles = times.unsqueeze(-1) @ self.get_buffer("frequencies")
        return torch.cat([torch.sin(angles), torch.cos(angles)], -1)


def build_model() -> nn.Module:
    return nn.Sequential(
        Waves(),
        nn.Linear(64, 1024),
        nn.ReLU(),
        nn.Linear(1024, 1024),
        nn.ReLU(),
        nn.Linear(1024, 1024),
        nn.ReLU(),
        nn.Linear(1024, 1),
    )


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=3e-4)


def build_data(batch_size):  # type: ignore[no-untyped-def]
    while True:
        times = torch.randint(4000, (batch_size,)).float()
        yield times, torch.sin(0.5 * times) + 0.5 * torch.cos(1.1 * times)


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(outputs.squeeze(-1), targets)
