"""A character LSTM of two layers over 64 steps, on the text of the standard library."""

from __future__ import annotations

import inspect
import json.decoder
from collections.abc import Iterator

import torch
from torch import nn

WIDTH, LENGTH = 256, 64


class LanguageModel(nn.Module):
    """Embedding, LSTM, and a head over the characters."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, 128)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embedding(inputs))
        out: torch.Tensor = self.head(hidden)
        return out


def build_model() -> nn.Module:
    return LanguageModel()


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def build_data(batch_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    text = torch.tensor([min(ord(c), 127) for c in inspect.getsource(json.decoder)])
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(text) - LENGTH, (batch_size, 1), generator=generator)
        window = text[starts + torch.arange(LENGTH + 1)]
        yield window[:, :-1], window[:, 1:]


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())
