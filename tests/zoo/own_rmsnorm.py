"""RMS normalisation without an upcast, of large activations."""

from __future__ import annotations

import sources
import torch
import torch.nn.functional as F
from torch import nn


class Norm(nn.Module):
    def forward(self, x):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(8, 64), Norm(), nn.Linear(64, 1)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(300 * self.first(x))))


def build_model():
    return Model()


def build_data(batch_size):
    return sources.values(batch_size)


def loss_fn(outputs, targets):
    return F.mse_loss(outputs.squeeze(-1), targets)
