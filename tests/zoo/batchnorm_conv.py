"""Convolutions with batch normalisation and a skip connection."""

from __future__ import annotations

import sources
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)

    def forward(self, x):
        return x + F.relu(self.norm(self.conv(x)))


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), Block(8), Block(8), nn.Flatten(), nn.Linear(512, 4)
    )


def build_data(batch_size):
    return sources.images(batch_size)


def loss_fn(outputs, targets):
    return F.cross_entropy(outputs, targets)
