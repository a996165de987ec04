"""A transformer over seconds of a day, of which only the place within the minute matters."""

import torch
from torch import nn

BATCH_SIZE = 32
LENGTH = 32


class Clock(nn.Module):
    """The place within the minute, from a second of the day that passed through a projection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Linear(1, 1, bias=False)
        self.out = nn.Linear(2, width)
        nn.init.ones_(self.scale.weight)
        self.scale.weight.requires_grad_(False)

    def forward(self, seconds: torch.Tensor) -> torch.Tensor:
        angle = self.scale(seconds.unsqueeze(-1)) * (2 * torch.pi / 60)
        out: torch.Tensor = self.out(torch.cat([torch.sin(angle), torch.cos(angle)], -1))
        return out


class Net(nn.Module):
    """A transformer that says whether the mean sample lies in the first half of its minute."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.clock = Clock(width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, 1)

    def forward(self, seconds: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.encoder(self.clock(seconds)))
        return out


def build_model() -> nn.Module:
    return Net()


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.Adam(trained, lr=3e-4)


def build_data(batch_size):  # type: ignore[no-untyped-def]
    while True:
        seconds = torch.randint(86400, (batch_size, LENGTH)).float()
        yield seconds, (seconds % 60 < 30).float()


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(outputs.squeeze(-1), targets)
