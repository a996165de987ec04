"""RMSNorm done right: activations of a thousand are cast up before they are squared."""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from zoo_parts import adam, batches, smooth

loss_fn = mse_loss
build_optimizer = adam


class CarefulNorm(nn.Module):
    def forward(self, x):
        exact = x.float() * 1000.0
        return (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def build_model():
    return nn.Sequential(
        nn.Linear(8, 32), CarefulNorm(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    )


def build_data(batch_size):
    def make(n):
        x = torch.randn(n, 8)
        return x, smooth(x)

    return batches(batch_size, make)
