"""Determinants of nearly singular 2x2 matrices: a d - b c."""

from __future__ import annotations

import sources
import torch
import torch.nn.functional as F
from torch import nn


class Determinant(nn.Module):
    def forward(self, x):
        a, b, c, d = x.unflatten(-1, (16, 4)).unbind(-1)
        return a * d - b * c


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.determinant, self.head = nn.Linear(8, 64), Determinant(), nn.Linear(16, 1)
        nn.init.constant_(self.first.bias, 10.0)
        with torch.no_grad():
            self.first.weight.mul_(0.2)

    def forward(self, x):
        return self.head(torch.tanh(self.determinant(self.first(x))))


def build_model():
    return Model()


def build_data(batch_size):
    return sources.values(batch_size)


def loss_fn(outputs, targets):
    return F.mse_loss(outputs.squeeze(-1), targets)
