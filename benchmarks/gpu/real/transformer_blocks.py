"""The transformer block that GPT-2, BERT and ViT share, with PyTorch's fused attention."""

from __future__ import annotations

import torch
from torch import nn


class Attention(nn.Module):
    """Self-attention of (batch, length, width), one product for queries, keys and values."""

    def __init__(self, width: int, heads: int, *, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        each = self.queries_keys_values(hidden).view(batch, length, 3, self.heads, -1)
        queries, keys, values = each.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(
            queries, keys, values, is_causal=self.causal
        )
        out: torch.Tensor = self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return out


class Block(nn.Module):
    """Attention and an MLP, each added to its input: normalised before (or after) as published."""

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        causal: bool = False,
        norm_after: bool = False,
        epsilon: float = 1e-5,
        approximate: str = "none",
    ) -> None:
        super().__init__()
        self.norm_after = norm_after
        self.attention = Attention(width, heads, causal=causal)
        self.first_norm = nn.LayerNorm(width, eps=epsilon)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(approximate=approximate),
            nn.Linear(4 * width, width),
        )
        self.second_norm = nn.LayerNorm(width, eps=epsilon)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.norm_after:
            hidden = self.first_norm(hidden + self.attention(hidden))
            out: torch.Tensor = self.second_norm(hidden + self.mlp(hidden))
            return out
        hidden = hidden + self.attention(self.first_norm(hidden))
        return hidden + self.mlp(self.second_norm(hidden))


def start_small(module: nn.Module) -> None:
    """Begin with the weights that GPT-2 and BERT begin with: normal, 0.02 wide; biases 0."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
