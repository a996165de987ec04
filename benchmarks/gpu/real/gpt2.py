"""GPT-2 with 124 million parameters at 1024 tokens: the model of nanoGPT and llm.c.

Its vocabulary of 50257 is no multiple of 8, which 16-bit products pay for; `gpt2_rounded` is the
same with one that is. Attention is PyTorch's fused one. There is no dropout, as in nanoGPT.
"""

from __future__ import annotations

import torch
from synthetic_data import Batches, sized, words
from torch import nn
from transformer_blocks import Block, start_small

BATCH_SIZE = sized(16, 4)
CLIP_GRAD_NORM = 1.0

VOCABULARY = sized(50257, 509)
LENGTH = sized(1024, 32)
LAYERS, HEADS, WIDTH = sized((12, 12, 768), (1, 2, 64))


class GPT2(nn.Module):
    """Blocks between an embedding and a head that share their weight."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(
            *(Block(WIDTH, HEADS, causal=True, approximate="tanh") for _ in range(LAYERS))
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.apply(start_small)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.blocks(self.tokens(tokens) + self.positions(places))
        out: torch.Tensor = self.head(self.norm(hidden))
        return out


def build_model() -> nn.Module:
    return GPT2(VOCABULARY)


def build_data(batch_size: int) -> Batches:
    for text in words(batch_size, LENGTH + 1, VOCABULARY):
        yield text[:, :-1], text[:, 1:]


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
