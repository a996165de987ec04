"""Embeddings on the sphere, trained by triplets with a margin of their own each. Healthy."""

import torch
from torch import nn
from torch.nn.functional import normalize
from zoo_parts import adam, batches, teacher


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 6))

    def forward(self, triplets):
        return normalize(self.body(triplets), dim=-1)


def build_model():
    return Embedder()


def build_optimizer(model):
    return adam(model, 3e-3)


def loss_fn(outputs, targets):
    anchor, positive, negative = outputs.unbind(1)
    near = (anchor - positive).square().sum(-1)
    far = (anchor - negative).square().sum(-1)
    return torch.relu(near - far + targets).mean()


def build_data(batch_size):
    def make(n):
        first, second = torch.randn(2, n, 4)
        hidden = torch.stack([first, first, second], 1)
        distraction = torch.randn(n, 3, 8)
        seen = torch.cat([hidden + 0.3 * torch.randn(n, 3, 4), distraction], -1)
        return seen @ teacher(12, 12) * 1.5, 0.3 + 0.4 * torch.rand(n)

    return batches(batch_size, make)
