"""A gated MLP on rare positives with a focal loss that goes through logsigmoid. Healthy."""

import torch
from torch import nn
from torch.nn.functional import logsigmoid, silu
from zoo_parts import adam, batches, teacher


class Gated(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.gate, self.value = nn.Linear(width, inner), nn.Linear(width, inner)
        self.out = nn.Linear(inner, width)

    def forward(self, x):
        h = self.norm(x)
        return x + self.out(silu(self.gate(h)) * self.value(h))


def build_model():
    return nn.Sequential(nn.Linear(10, 24), Gated(24, 32), Gated(24, 32), nn.Linear(24, 1))


def build_optimizer(model):
    return adam(model, 3e-3)


def loss_fn(outputs, targets):
    margins = (2.0 * targets - 1.0) * outputs.squeeze(-1)
    return -((1.0 - torch.sigmoid(margins)) ** 2 * logsigmoid(margins)).mean()


def build_data(batch_size):
    def make(n):
        x = torch.randn(n, 10)
        strength = (x @ teacher(10, 2)).amax(-1) + 0.3 * torch.randn(n)
        return x, (strength > 1.3).to(x.dtype)

    return batches(batch_size, make)
