"""x ** 4 of activations around twenty."""

from __future__ import annotations

import sources
import torch
import torch.nn.functional as F
from torch import nn


class Power(nn.Module):
    def forward(self, x):
        return torch.log1p(x.abs() ** 4)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.power, self.head = nn.Linear(8, 64), Power(), nn.Linear(64, 1)

    def forward(self, x):
        return self.head(self.power(20 * self.first(x)) / 10)


def build_model():
    return Model()


def build_data(batch_size):
    return sources.values(batch_size)


def loss_fn(outputs, targets):
    return F.mse_loss(outputs.squeeze(-1), targets)
