"""Distances between far points that lie close together, by a^2 + b^2 - 2ab. Silent."""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from zoo_parts import adam, batches

loss_fn = mse_loss
build_optimizer = adam


class Distances(nn.Module):
    def forward(self, first, second):
        product = (first.unsqueeze(1) @ second.unsqueeze(2)).reshape(-1, 1)
        squares = (first * first + second * second).sum(-1, keepdim=True)
        return (squares - 2.0 * product).clamp_min(0.0)


class Metric(nn.Module):
    def __init__(self):
        super().__init__()
        self.distances = Distances()
        self.body = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x):
        return self.body(self.distances(x[:, 0], x[:, 1]))


def build_model():
    return Metric()


def build_data(batch_size):
    def make(n):
        first, step = torch.randn(n, 4) + 20.0, torch.randn(n, 4) * 0.5
        return torch.stack([first, first + step], 1), torch.tanh((step**2).sum(-1, keepdim=True))

    return batches(batch_size, make)
