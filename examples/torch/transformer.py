"""A small GPT-like transformer that reads bytes: the source of Python's own standard library.

autoprec tune examples/torch/transformer.py        # this is `make demo`
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

BATCH_SIZE = 16  # sequences in a batch, kept; without this line the tuner may choose the batch
CONTEXT = 64  # bytes in a sequence
WIDTH = 384
HEADS = 6
BLOCKS = 2


@cache
def read_text() -> torch.Tensor:
    """Return the standard library's modules as one tensor of bytes, in a fixed order."""
    modules = sorted(Path(os.__file__).parent.glob("*.py"))
    text = b"\n".join(path.read_bytes() for path in modules)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


class Block(nn.Module):
    """Causal self-attention, then a dense net, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.dense = nn.Sequential(
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.GELU(),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        heads = self.query_key_value(self.attention_norm(hidden)).unflatten(-1, (3, HEADS, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(mixed.transpose(1, 2).flatten(2))
        return hidden + self.dense(hidden)


class ByteTransformer(nn.Module):
    """Give, for every byte of a sequence, the logits of the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, sequence: torch.Tensor) -> torch.Tensor:
        position = torch.arange(sequence.shape[1], device=sequence.device)
        hidden = self.bytes(sequence) + self.positions(position)
        return self.head(self.norm(self.blocks(hidden)))


def build_model() -> nn.Module:
    return ByteTransformer()


def build_data(batch_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield endless batches of sequences and the same sequences one byte later."""
    text = read_text()[:-100_000]
    generator = torch.Generator().manual_seed(0)
    window = torch.arange(CONTEXT + 1)
    while True:
        starts = torch.randint(len(text) - CONTEXT, (batch_size, 1), generator=generator)
        sequences = text[starts + window].long()
        yield sequences[:, :-1], sequences[:, 1:]


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


@torch.no_grad()
def evaluate(model: nn.Module) -> float:
    """Return the share of bytes predicted right in text that was not trained on."""
    device = next(model.parameters()).device
    held_out = read_text()[-100_000:].long().to(device)
    sequences = held_out[: 256 * (CONTEXT + 1)].view(256, CONTEXT + 1)
    model.eval()
    predicted = model(sequences[:, :-1]).argmax(-1)
    model.train()
    return (predicted == sequences[:, 1:]).float().mean().item()
