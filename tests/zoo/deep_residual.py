"""Eight residual blocks with layer normalisation."""

from __future__ import annotations

import sources
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def build_model():
    return nn.Sequential(nn.Linear(16, 32), *(Block() for _ in range(8)), nn.Linear(32, 4))


def build_data(batch_size):
    return sources.classes(batch_size)


def loss_fn(outputs, targets):
    return F.cross_entropy(outputs, targets)
