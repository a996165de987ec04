"""A normalisation of its own by E[x^2] - E[x]^2 about a large mean. Silent in bfloat16."""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from zoo_parts import adam, batches, smooth

loss_fn = mse_loss
build_optimizer = adam


class OwnNorm(nn.Module):
    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        variance = (x * x).mean(-1, keepdim=True) - mean * mean
        return (x - mean) * torch.rsqrt(variance.clamp_min(1e-3))


class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 32)
        nn.init.constant_(self.first.bias, 12.0)
        self.norm = OwnNorm()
        self.body = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x):
        return self.body(self.norm(self.first(x)))


def build_model():
    return Shifted()


def build_data(batch_size):
    def make(n):
        x = torch.randn(n, 8)
        return x, smooth(x)

    return batches(batch_size, make)
