"""A derivative by finite differences of the network itself."""

from __future__ import annotations

import sources
import torch
import torch.nn.functional as F
from torch import nn


class Slope(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x):
        return (self.net(x + 0.01) - self.net(x)) / 0.01


def build_model():
    return Slope()


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def build_data(batch_size):
    for _ in range(sources.COUNT):
        x = 4 * torch.rand(batch_size, 1) - 2
        yield x, torch.cos(2 * x)


def loss_fn(outputs, targets):
    return F.mse_loss(outputs, targets)
