"""Explicit Euler with a hundred small steps."""

from __future__ import annotations

import sources
import torch
import torch.nn.functional as F
from torch import nn


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.rate = nn.Linear(8, 8)

    def forward(self, x):
        speed = torch.tanh(self.rate(x))
        for _ in range(100):
            x = x + 0.005 * (speed - 0.5 * x)
        return x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.flow, self.head = nn.Linear(8, 8), Flow(), nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.flow(self.enter(x) + 2))


def build_model():
    return Model()


def build_data(batch_size):
    return sources.values(batch_size)


def loss_fn(outputs, targets):
    return F.mse_loss(outputs.squeeze(-1), targets)
