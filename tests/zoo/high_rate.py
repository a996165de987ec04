"""A learning rate at the edge: training is chaotic in float32 too."""

from __future__ import annotations

import sources
import torch
import torch.nn.functional as F
from torch import nn


def build_model():
    return nn.Sequential(
        nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)
    )


def build_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=1.5, momentum=0.9)


def build_data(batch_size):
    return sources.classes(batch_size)


def loss_fn(outputs, targets):
    return F.cross_entropy(outputs, targets)
