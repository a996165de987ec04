"""Positions as floats beyond 2048, multiplied with frequencies by a matmul."""

from __future__ import annotations

import sources
import torch
import torch.nn.functional as F
from torch import nn


class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", torch.linspace(0.1, 1.5, 15).unsqueeze(0))

    def forward(self, t):
        angles = t.unsqueeze(-1) @ self.frequencies
        return torch.cat([torch.sin(angles), torch.cos(angles)], -1)


def build_model():
    return nn.Sequential(Waves(), nn.Linear(30, 1))


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def build_data(batch_size):
    for _ in range(sources.COUNT):
        t = torch.randint(4000, (batch_size,)).float()
        yield t, torch.sin(0.5 * t) + 0.5 * torch.cos(1.1 * t)


def loss_fn(outputs, targets):
    return F.mse_loss(outputs.squeeze(-1), targets)
