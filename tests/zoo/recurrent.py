"""A GRU language model."""

from __future__ import annotations

import sources
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.body = nn.Embedding(20, 32), nn.GRU(32, 32, batch_first=True)
        self.head = nn.Linear(32, 20)

    def forward(self, x):
        return self.head(self.body(self.tokens(x))[0])


def build_model():
    return Model()


def build_data(batch_size):
    return sources.tokens(batch_size, length=10)


def loss_fn(outputs, targets):
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())
