"""An RBF network on degrees north and east, distances by x^2 - 2xc + c^2. Silent in both."""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from zoo_parts import adam, batches, smooth

loss_fn = mse_loss
TOWN = torch.tensor([48.1, 11.6])


class Kernel(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.centres = nn.Parameter(TOWN + torch.rand(count, 2) - 0.5)

    def forward(self, x):
        squares = x.square().sum(-1, keepdim=True) + self.centres.square().sum(-1)
        distances = squares - 2.0 * (x @ self.centres.T)
        return torch.exp(-8.0 * distances.clamp_min(0.0))


def build_model():
    return nn.Sequential(Kernel(32), nn.Linear(32, 1))


def build_optimizer(model):
    return adam(model, 1e-2)


def build_data(batch_size):
    def make(n):
        offset = torch.rand(n, 2) - 0.5
        return TOWN + offset, 2.0 * smooth(4.0 * offset) + 0.1 * torch.randn(n, 1)

    return batches(batch_size, make)
