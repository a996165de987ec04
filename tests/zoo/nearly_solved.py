"""A task solved almost exactly: the loss falls by four orders of magnitude."""

from __future__ import annotations

import sources
import torch
import torch.nn.functional as F
from torch import nn


def build_model():
    return nn.Linear(8, 1)


def build_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05)


def build_data(batch_size):
    weights = sources.fixed(8)
    return ((x, x @ weights + 0.05 * torch.randn(len(x))) for x, _ in sources.values(batch_size))


def loss_fn(outputs, targets):
    return F.mse_loss(outputs.squeeze(-1), targets)
