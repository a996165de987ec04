"""A normalising flow of affine couplings fits a bent density in the plane. Healthy."""

import torch
from torch import nn
from zoo_parts import adam, batches


def loss_fn(outputs, targets):
    latent, volume = outputs
    return (0.5 * latent.square().sum(-1) - volume).mean() + 1.838


class Coupling(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 24), nn.SiLU(), nn.Linear(24, 2))
        nn.init.normal_(self.net[2].weight, std=0.05)
        nn.init.zeros_(self.net[2].bias)

    def forward(self, kept, moved):
        scale, shift = self.net(kept).chunk(2, -1)
        scale = torch.tanh(scale)
        return moved * torch.exp(scale) + shift, scale.squeeze(-1)


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps = nn.ModuleList(Coupling() for _ in range(6))

    def forward(self, x):
        first, second = x.chunk(2, -1)
        volume = torch.zeros_like(x[:, 0])
        for step in self.steps:
            moved, grown = step(first, second)
            first, second, volume = moved, first, volume + grown
        return torch.cat([first, second], -1), volume


def build_model():
    return Flow()


def build_optimizer(model):
    return adam(model, 4e-3)


def build_data(batch_size):
    def make(n):
        along = torch.randn(n, 1)
        points = torch.cat([along, 0.7 * (along.square() - 1) + 0.25 * torch.randn(n, 1)], 1)
        return points, points

    return batches(batch_size, make)
