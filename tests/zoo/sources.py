"""Synthetic data for the zoo: endless within reason, drawn from torch's global generator."""

from __future__ import annotations

from collections.abc import Iterator

import torch

COUNT = 400
"""Batches one call gives; longer runs start again."""

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


def fixed(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers that are the same in every run: a teacher's weights."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes(batch_size: int, features: int = 16, count: int = 4, scale: float = 1.0) -> Batches:
    """Points with the class a small teacher network gives them."""
    first, second = fixed(features, 32), fixed(32, count, seed=1)
    for _ in range(COUNT):
        x = torch.randn(batch_size, features)
        yield scale * x, (torch.tanh(x @ first) @ second).argmax(-1)


def values(batch_size: int, features: int = 8, scale: float = 1.0) -> Batches:
    """Points with a smooth function of them, about one in size."""
    weights = fixed(features, 1) / features**0.5
    for _ in range(COUNT):
        x = torch.randn(batch_size, features)
        yield scale * x, torch.sin(2 * (x @ weights)).squeeze(-1)


def tokens(batch_size: int, length: int = 16, vocabulary: int = 20) -> Batches:
    """Sequences of a Markov chain, with the same one step on."""
    table = torch.softmax(3 * fixed(vocabulary, vocabulary), -1)
    for _ in range(COUNT):
        now = torch.randint(vocabulary, (batch_size,))
        row = [now]
        for _ in range(length):
            now = torch.multinomial(table[now], 1).squeeze(-1)
            row.append(now)
        whole = torch.stack(row, 1)
        yield whole[:, :-1], whole[:, 1:]


def images(batch_size: int, side: int = 8, channels: int = 1, count: int = 4) -> Batches:
    """Noisy pictures of one of a few fixed patterns."""
    patterns = fixed(count, channels, side, side)
    for _ in range(COUNT):
        y = torch.randint(count, (batch_size,))
        yield patterns[y] + 1.5 * torch.randn(batch_size, channels, side, side), y
