"""Click-through rates from categories and numbers: embeddings, a cross network, and a tower."""

from collections.abc import Iterator

import torch
from torch import nn

SIZES = (1000, 5000, 200, 50, 20000, 12, 31, 400)
NUMBERS, WIDTH = 13, 16
BATCH_SIZE = 512


class Cross(nn.Module):
    """x0 * (W x + b) + x."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, first: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = first * self.linear(last) + last
        return out


class DeepAndCross(nn.Module):
    """Two ways through the same features, joined at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, WIDTH) for size in SIZES)
        width = WIDTH * len(SIZES) + NUMBERS
        self.norm = nn.BatchNorm1d(NUMBERS)
        self.crosses = nn.ModuleList(Cross(width) for _ in range(3))
        self.tower = nn.Sequential(
            nn.Linear(width, 512), nn.ReLU(), nn.Dropout(0.2), nn.Linear(512, 256), nn.ReLU()
        )
        self.head = nn.Linear(width + 256, 1)

    def forward(self, features: dict[str, torch.Tensor]) -> torch.Tensor:
        categories = features["categories"]
        looked_up = [table(categories[:, i]) for i, table in enumerate(self.tables)]
        first = torch.cat([*looked_up, self.norm(features["numbers"])], dim=1)
        crossed = first
        for cross in self.crosses:
            crossed = cross(first, crossed)
        out: torch.Tensor = self.head(torch.cat([crossed, self.tower(first)], dim=1))
        return out.squeeze(1)


def build_model() -> nn.Module:
    return DeepAndCross()


def build_data(batch_size: int) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
    while True:
        columns = [torch.randint(size, (batch_size,)) for size in SIZES]
        numbers = torch.randn(batch_size, NUMBERS).exp().log1p()
        rate = torch.sigmoid(numbers[:, 0] - numbers[:, 1] + 0.2 * (columns[5] % 3) - 1.0)
        clicked = torch.bernoulli(rate)
        yield {"categories": torch.stack(columns, dim=1), "numbers": numbers}, clicked


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.binary_cross_entropy_with_logits(outputs, targets)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    tables = [p for n, p in model.named_parameters() if n.startswith("tables")]
    others = [p for n, p in model.named_parameters() if not n.startswith("tables")]
    return torch.optim.AdamW(
        [{"params": tables, "weight_decay": 0.0}, {"params": others, "weight_decay": 1e-2}], lr=1e-3
    )
