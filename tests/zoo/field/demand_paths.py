"""Quantiles of a day's running demand, steps summed and then scaled by each shop's mean."""

import torch
from field_parts import batches, fixed
from torch import nn
from torch.nn.functional import softplus

TRUTH_STEPS = 300
LEVELS = (0.1, 0.5, 0.9)


class Paths(nn.Module):
    def __init__(self, hours=96):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3 * hours))

    def forward(self, batch):
        x, mean = batch
        steps = softplus(self.body(x)).unflatten(-1, (3, -1))
        return steps.cumsum(-1) * mean[:, None, None]


def build_model():
    return Paths()


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=3e-3)


def build_data(batch_size):
    def make(n):
        x, mean = torch.randn(n, 6), torch.exp(4 + torch.randn(n))
        rate = softplus(x @ fixed(6, 96) / 3)
        noisy = rate * (1 + 0.1 * torch.randn(n, 96))
        return (x, mean), noisy.cumsum(-1) * mean[:, None]

    return batches(batch_size, make)


def loss_fn(outputs, demand):
    levels = torch.tensor(LEVELS, device=outputs.device)[:, None]
    away = demand[:, None] - outputs
    return torch.maximum(levels * away, (levels - 1) * away).mean()
