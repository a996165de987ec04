"""A hand-written softmax that does not subtract the maximum."""

from __future__ import annotations

import sources
import torch
import torch.nn.functional as F
from torch import nn


class Attend(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.value = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, x):
        weights = torch.exp(6 * self.query(x))
        return self.value(x) * weights / weights.sum(-1, keepdim=True)


def build_model():
    return nn.Sequential(nn.Linear(16, 16), Attend(), nn.Linear(8, 4))


def build_data(batch_size):
    return sources.classes(batch_size)


def loss_fn(outputs, targets):
    return F.cross_entropy(outputs, targets)
