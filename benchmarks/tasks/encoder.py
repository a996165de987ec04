"""A transformer encoder over 32 tokens."""

from collections.abc import Iterator

import torch
from torch import nn


class Encoder(nn.Module):
    """Embeds tokens, encodes them, and classifies their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(1000, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, dropout=0.1)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(128, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.encoder(self.tokens(tokens)).mean(dim=1))
        return out


def build_model() -> nn.Module:
    return Encoder()


def build_data(batch_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    while True:
        yield torch.randint(1000, (batch_size, 32)), torch.randint(10, (batch_size,))


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets)
