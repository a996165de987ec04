"""A cosine similarity guarded by 1e-8, with rows of zeros."""

from __future__ import annotations

import sources
import torch
import torch.nn.functional as F
from torch import nn


class Cosine(nn.Module):
    def forward(self, a, b):
        a = a / (torch.sqrt((a * a).sum(-1, keepdim=True)) + 1e-8)
        return a @ (b / (torch.sqrt((b * b).sum(-1, keepdim=True)) + 1e-8)).T


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.cosine = nn.Linear(16, 32, bias=False), Cosine()
        self.anchors = nn.Linear(4, 32)
        self.register_buffer("corners", torch.eye(4))

    def forward(self, x):
        h = F.relu(self.body(x) * 1e-3)
        return 10 * self.cosine(h, self.anchors(self.corners))


def build_model():
    return Model()


def build_data(batch_size):
    for x, y in sources.classes(batch_size):
        yield x * (torch.rand(batch_size, 1) > 0.1), y


def loss_fn(outputs, targets):
    return F.cross_entropy(outputs, targets)
