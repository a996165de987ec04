"""Hand-written binary cross-entropy: log p and log(1 - p) inside the model.

In float16 the log meets a zero once the network is confident: in four of thirty runs of 200 steps,
at steps 168 to 180.
"""

from __future__ import annotations

import sources
import torch
from torch import nn

TRUTH_STEPS = 300


class Entropy(nn.Module):
    def forward(self, logits, y):
        p = torch.sigmoid(logits)
        return -(y * torch.log(p) + (1 - y) * torch.log(1 - p + 1e-6))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
        self.entropy = Entropy()

    def forward(self, x, y):
        return self.entropy(8 * self.body(x).squeeze(-1), y)


def build_model():
    return Model()


def build_data(batch_size):
    return ((x, (x[:, 0] + x[:, 1] > 0).float()) for x, _ in sources.classes(batch_size))


def training_step(model, batch):
    x, y = batch
    return model(x, y).mean()
