"""Four blocks in the shape of Llama 3 8B at 4096 tokens, without embedding and head.

0.87 billion parameters in layers wide enough for any number format. Words enter as fixed vectors,
and each position is to give the vector of the next word.
"""

from __future__ import annotations

import torch
from synthetic_data import WORDS, Batches, sized, words
from torch import nn

BATCH_SIZE = sized(2, 4)
CLIP_GRAD_NORM = 1.0

LENGTH, LAYERS = sized((4096, 4), (32, 1))
WIDTH, HIDDEN, HEADS, GROUPS = sized((4096, 14336, 32, 8), (64, 128, 4, 2))
BASE = 500_000.0  # of the wavelengths of positions


class Attention(nn.Module):
    """Causal attention whose heads share keys and values in groups; positions are rotations."""

    def __init__(self) -> None:
        super().__init__()
        self.size = WIDTH // HEADS
        self.queries_keys_values = nn.Linear(WIDTH, (HEADS + 2 * GROUPS) * self.size, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        batch, length, _ = hidden.shape
        heads = self.queries_keys_values(hidden).view(batch, length, -1, self.size).transpose(1, 2)
        queries, keys, values = heads.split([HEADS, GROUPS, GROUPS], dim=1)
        keys, values = (each.repeat_interleave(HEADS // GROUPS, 1) for each in (keys, values))
        attended = nn.functional.scaled_dot_product_attention(
            turned(queries, turns), turned(keys, turns), values, is_causal=True
        )
        out: torch.Tensor = self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return out


def turned(heads: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Return (batch, heads, length, size) with pairs of values turned by (2, length, size / 2)."""
    first, second = heads.chunk(2, dim=-1)
    cos, sin = turns.to(heads.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Block(nn.Module):
    """Attention and a gated MLP, each of what is normalised, added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.first_norm, self.second_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.first_norm(hidden), turns)
        normed = self.second_norm(hidden)
        out: torch.Tensor = hidden + self.down(
            nn.functional.silu(self.gate(normed)) * self.up(normed)
        )
        return out


class Stack(nn.Module):
    """The blocks, and how far each position turns."""

    turns: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        size = WIDTH // HEADS
        waves = BASE ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(LENGTH), waves)
        self.register_buffer("turns", torch.stack([angles.cos(), angles.sin()]), persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden, self.turns)
        return hidden


def build_model() -> nn.Module:
    return Stack()


def build_data(batch_size: int) -> Batches:
    table = torch.randn(WORDS, WIDTH, generator=torch.Generator().manual_seed(0))
    for text in words(batch_size, LENGTH + 1, WORDS):
        yield table[text[:, :-1]], table[text[:, 1:]]


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, targets)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1)
