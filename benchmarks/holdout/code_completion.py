"""A small language model as they are built now: RMS norm, rotary positions, gated layers, GQA."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, WIDTH, HEADS, GROUPS, LENGTH, LAYERS = 4096, 192, 6, 2, 64, 3
CLIP_GRAD_NORM = 1.0


def rotate(values: torch.Tensor) -> torch.Tensor:
    """Turn pairs of features by angles that grow with the position."""
    half = values.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, device=values.device) / half)
    angles = torch.arange(values.shape[-2], device=values.device)[:, None] * rates
    cos, sin = angles.cos().to(values.dtype), angles.sin().to(values.dtype)
    left, right = values[..., :half], values[..., half:]
    return torch.cat([left * cos - right * sin, left * sin + right * cos], dim=-1)


class Block(nn.Module):
    """Attention with fewer keys than queries, then a gated feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.before, self.between = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key_value = nn.Linear(WIDTH, 2 * GROUPS * size, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, 2 * 512, bias=False)
        self.down = nn.Linear(512, WIDTH, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, _ = hidden.shape
        normed = self.before(hidden)
        query = self.query(normed).view(batch, length, HEADS, -1).transpose(1, 2)
        key, value = (
            self.key_value(normed)
            .view(batch, length, 2 * GROUPS, -1)
            .transpose(1, 2)
            .chunk(2, dim=1)
        )
        key, value = (each.repeat_interleave(HEADS // GROUPS, dim=1) for each in (key, value))
        mixed = F.scaled_dot_product_attention(rotate(query), rotate(key), value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.gate(self.between(hidden)).chunk(2, dim=-1)
        out: torch.Tensor = hidden + self.down(F.silu(gate) * up)
        return out


class Decoder(nn.Module):
    """Embedding, blocks, norm, and a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.tokens(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        logits: torch.Tensor = self.head(self.norm(hidden))
        return logits


def build_model() -> nn.Module:
    return Decoder()


def build_data(batch_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    while True:
        starts = torch.randint(VOCABULARY, (batch_size, 1))
        steps = torch.randint(1, 5, (batch_size, 1))
        tokens = (starts + steps * torch.arange(LENGTH + 1)) % VOCABULARY
        yield tokens[:, :-1], tokens[:, 1:]


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
