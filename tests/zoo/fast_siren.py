"""A sine layer of frequency 300 after a linear layer: phases off by half a radian in bfloat16."""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from zoo_parts import batches

loss_fn = mse_loss


class FastSine(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.linear = nn.Linear(1, outputs)
        nn.init.uniform_(self.linear.weight, -0.5, 0.5)

    def forward(self, t):
        return torch.sin(300.0 * self.linear(t))


def build_model():
    return nn.Sequential(FastSine(128), nn.Linear(128, 1))


def build_optimizer(model):
    groups = [
        {"params": model[0].parameters(), "lr": 1e-5},
        {"params": model[1].parameters(), "lr": 5e-3},
    ]
    return torch.optim.Adam(groups)


def build_data(batch_size):
    def make(n):
        t = 1.0 + torch.rand(n, 1)
        sound = 0.6 * torch.sin(61.0 * t) + 0.5 * torch.sin(97.0 * t + 1.0)
        sound = sound + 0.5 * torch.sin(141.0 * t + 2.0)
        return t, sound + 0.15 * torch.randn(n, 1)

    return batches(batch_size, make)
