"""A hand-written layer norm of activations around a thousand."""

from __future__ import annotations

import sources
import torch.nn.functional as F
from torch import nn


class Norm(nn.Module):
    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return centred / ((centred**2).mean(-1, keepdim=True) + 1e-5).sqrt()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(16, 64), Norm(), nn.Linear(64, 4)

    def forward(self, x):
        return self.head(F.relu(self.norm(1000 * self.first(x))))


def build_model():
    return Model()


def build_data(batch_size):
    return sources.classes(batch_size)


def loss_fn(outputs, targets):
    return F.cross_entropy(outputs, targets)
