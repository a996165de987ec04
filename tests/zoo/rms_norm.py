"""RMSNorm without an upcast on activations of several hundred: squares leave float16's range."""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from zoo_parts import adam, batches, smooth

loss_fn = mse_loss
build_optimizer = adam


class HastyNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        x = x * 500.0
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.weight


def build_model():
    return nn.Sequential(
        nn.Linear(8, 32), HastyNorm(32), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    )


def build_data(batch_size):
    def make(n):
        x = torch.randn(n, 8)
        return x, smooth(x)

    return batches(batch_size, make)
