"""BERT-base with its masked-words head (110 million parameters), for the tasks at two lengths.

15 % of the words are hidden, and the loss is of those; the head computes every position, as
published implementations do. There is no dropout.
"""

from __future__ import annotations

import torch
from synthetic_data import Batches, sized, words
from torch import nn
from transformer_blocks import Block, start_small

VOCABULARY, POSITIONS = sized(30522, 509), 512
LAYERS, HEADS, WIDTH = sized((12, 12, 768), (1, 2, 64))
EPSILON = 1e-12
HIDDEN_SHARE, MASK, NO_TARGET = 0.15, 103, -100


class Bert(nn.Module):
    """An encoder, and a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(POSITIONS, WIDTH)
        self.segments = nn.Embedding(2, WIDTH)
        self.norm = nn.LayerNorm(WIDTH, eps=EPSILON)
        self.blocks = nn.Sequential(
            *(Block(WIDTH, HEADS, norm_after=True, epsilon=EPSILON) for _ in range(LAYERS))
        )
        self.transform = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH, eps=EPSILON)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.apply(start_small)
        self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        places = torch.arange(words.shape[1], device=words.device)
        embedded = self.words(words) + self.positions(places) + self.segments.weight[0]
        out: torch.Tensor = self.head(self.transform(self.blocks(self.norm(embedded))))
        return out


def masked_words(batch_size: int, length: int) -> Batches:
    """Yield texts (batch, length) with words hidden, and those words; NO_TARGET elsewhere."""
    for text in words(batch_size, length, VOCABULARY):
        hidden = torch.rand(text.shape) < HIDDEN_SHARE
        yield text.masked_fill(hidden, MASK), text.masked_fill(~hidden, NO_TARGET)


def masked_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of the words that were hidden."""
    return nn.functional.cross_entropy(
        outputs.flatten(0, 1), targets.flatten(), ignore_index=NO_TARGET
    )


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """Return BERT's optimizer."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
