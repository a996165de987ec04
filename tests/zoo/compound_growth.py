"""Growth as a cumulative product of 1 + rate with daily rates of 0.001. Silent in both."""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from zoo_parts import adam, batches, teacher

loss_fn = mse_loss
DAYS = 60


class Compound(nn.Module):
    def forward(self, rates):
        return (1.0 + rates).cumprod(1)[:, -1]


class Savings(nn.Module):
    def __init__(self):
        super().__init__()
        self.rate = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 1), nn.Tanh())
        self.compound = Compound()

    def forward(self, days):
        growth = self.compound(1e-3 * self.rate(days).squeeze(-1))
        return 100.0 * (growth - 1.0)


def build_model():
    return Savings()


def build_optimizer(model):
    return adam(model, 1e-2)


def build_data(batch_size):
    def make(n):
        days = torch.randn(n, DAYS, 4)
        rates = 1e-3 * torch.tanh(1.5 * (days @ teacher(4, 1)).squeeze(-1))
        earned = 100.0 * torch.log1p(rates).sum(1).expm1()
        return days, earned + 0.1 * torch.randn(n)

    return batches(batch_size, make)
