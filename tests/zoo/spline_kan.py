"""A Kolmogorov-Arnold network: learned curves on cubic B-splines, absolute loss. Healthy."""

import torch
from torch import nn
from torch.nn.functional import l1_loss, linear, silu
from zoo_parts import batches

loss_fn = l1_loss


class Curves(nn.Module):
    """Sums of curves of the inputs, which are to lie between -1 and 1."""

    def __init__(self, inputs, outputs, knots=8):
        super().__init__()
        self.step = 2 / (knots - 3)
        self.register_buffer("centres", -1 + self.step * (torch.arange(knots) - 1.0))
        self.base = nn.Linear(inputs, outputs)
        self.weights = nn.Parameter(0.1 * torch.randn(outputs, inputs * knots))

    def forward(self, x):
        apart = ((x.unsqueeze(-1) - self.centres) / self.step).abs()
        near = 2 / 3 - apart.square() + apart**3 / 2
        far = (2 - apart).clamp(min=0) ** 3 / 6
        basis = torch.where(apart < 1, near, far)
        return self.base(silu(x)) + linear(basis.flatten(-2), self.weights)


def build_model():
    return nn.Sequential(Curves(4, 8), nn.Tanh(), Curves(8, 1))


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=1e-5)


def build_data(batch_size):
    def make(n):
        x = 2 * torch.rand(n, 4) - 1
        a, b, c, d = x.split(1, -1)
        return x, torch.sin(torch.pi * a) + b.square() + torch.exp(0.5 * c * d) - 1.3

    return batches(batch_size, make)
