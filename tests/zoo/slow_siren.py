"""A sine network of frequency three, on a slowly varying surface. Healthy."""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from zoo_parts import adam, batches

loss_fn = mse_loss


class Sine(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, x):
        return torch.sin(3.0 * self.linear(x))


def build_model():
    return nn.Sequential(Sine(2, 32), Sine(32, 32), nn.Linear(32, 1))


def build_optimizer(model):
    return adam(model, 2e-3)


def build_data(batch_size):
    def make(n):
        x = 2.0 * torch.rand(n, 2) - 1.0
        height = torch.sin(3.0 * x[:, :1]) * torch.cos(2.0 * x[:, 1:]) + 0.5 * x[:, :1] * x[:, 1:]
        return x, height + 0.2 * torch.randn(n, 1)

    return batches(batch_size, make)
