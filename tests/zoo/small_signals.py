"""Signals of 1e-4 brought to unit power: float16 squares them to nothing, and divides by it."""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from zoo_parts import adam, batches, smooth

loss_fn = mse_loss
build_optimizer = adam


class UnitPower(nn.Module):
    def forward(self, x):
        x = x * 1e-4
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True))


def build_model():
    return nn.Sequential(
        nn.Linear(8, 32), UnitPower(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    )


def build_data(batch_size):
    def make(n):
        x = torch.randn(n, 8)
        return x, smooth(x)

    return batches(batch_size, make)
