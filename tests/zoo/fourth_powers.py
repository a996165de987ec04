"""Fourth powers of activations around sixteen: beyond float16's range."""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from zoo_parts import adam, batches

loss_fn = mse_loss
build_optimizer = adam


class Powers(nn.Module):
    def forward(self, x):
        x = 10.0 * x
        return (x**4).mean(-1, keepdim=True) ** 0.25 / 10.0


def build_model():
    return nn.Sequential(nn.Linear(6, 24), Powers(), nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))


def build_data(batch_size):
    def make(n):
        x = 2.0 * torch.randn(n, 6)
        return x, torch.sqrt((x * x).mean(-1, keepdim=True))

    return batches(batch_size, make)
