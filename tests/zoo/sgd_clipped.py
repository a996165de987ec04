"""SGD with momentum and clipping."""

from __future__ import annotations

import sources
import torch
import torch.nn.functional as F
from torch import nn

CLIP_GRAD_NORM = 1.0


def build_model():
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))


def build_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def build_data(batch_size):
    return sources.classes(batch_size)


def loss_fn(outputs, targets):
    return F.cross_entropy(outputs, targets)
