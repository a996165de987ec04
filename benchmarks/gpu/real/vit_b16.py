"""ViT-B/16 at 224 pixels: 87 million parameters, almost all of them in matrix products."""

from __future__ import annotations

import torch
from synthetic_data import Batches, images, sized
from torch import nn
from transformer_blocks import Block

BATCH_SIZE = sized(128, 4)

PIXELS, PATCH, CLASSES = sized((224, 16, 1000), (32, 16, 10))
LAYERS, HEADS, WIDTH = sized((12, 12, 768), (1, 2, 64))
EPSILON = 1e-6


class VisionTransformer(nn.Module):
    """Patches as words, and one more whose last state is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.first = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + (PIXELS // PATCH) ** 2, WIDTH))
        self.blocks = nn.Sequential(*(Block(WIDTH, HEADS, epsilon=EPSILON) for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH, eps=EPSILON)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, seen: torch.Tensor) -> torch.Tensor:
        patches = self.patches(seen).flatten(2).transpose(1, 2)
        words = torch.cat([self.first.expand(len(seen), -1, -1), patches], dim=1)
        out: torch.Tensor = self.head(self.norm(self.blocks(words + self.positions))[:, 0])
        return out


def build_model() -> nn.Module:
    return VisionTransformer()


def build_data(batch_size: int) -> Batches:
    return images(batch_size, PIXELS, CLASSES)


def loss_fn(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, targets)


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.05)
