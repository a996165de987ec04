"""Chebyshev polynomials up to the 14th from powers, with huge terms. Fails in both formats."""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from zoo_parts import adam, batches, teacher

loss_fn = mse_loss
DEGREE = 14


def coefficients():
    rows = torch.zeros(DEGREE + 1, DEGREE + 1)
    rows[0, 0] = rows[1, 1] = 1
    for i in range(2, DEGREE + 1):
        rows[i] = 2 * rows[i - 1].roll(1) - rows[i - 2]
    return rows.t().contiguous()


class Chebyshev(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("powers", torch.arange(DEGREE + 1))
        self.register_buffer("terms", coefficients())

    def forward(self, x):
        return x**self.powers @ self.terms


def build_model():
    return nn.Sequential(Chebyshev(), nn.Linear(DEGREE + 1, 32), nn.Tanh(), nn.Linear(32, 1))


def build_optimizer(model):
    return adam(model, 1e-2)


def build_data(batch_size):
    weights = 1.5 * teacher(DEGREE + 1, 1, seed=23)

    def make(n):
        angle = torch.pi * torch.rand(n, 1)
        waves = torch.cos(angle * torch.arange(DEGREE + 1))
        return angle.cos(), waves @ weights + 0.05 * torch.randn(n, 1)

    return batches(batch_size, make)
