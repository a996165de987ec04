"""Standard deviation guarded by 1e-12 of channels that barely vary."""

from __future__ import annotations

import sources
import torch
import torch.nn.functional as F
from torch import nn


class Standard(nn.Module):
    def forward(self, x):
        centred = x - x.mean(0)
        return centred / torch.sqrt((centred**2).mean(0) + 1e-12)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.standard, self.head = nn.Linear(8, 32), Standard(), nn.Linear(32, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.standard(1e-4 * self.first(x))))


def build_model():
    return Model()


def build_data(batch_size):
    return sources.values(batch_size)


def loss_fn(outputs, targets):
    return F.mse_loss(outputs.squeeze(-1), targets)
