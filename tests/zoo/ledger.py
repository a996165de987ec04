"""Amounts converted by a matmul, long sums subtracted: totals of 6000. Silent in bfloat16 only."""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from zoo_parts import adam, batches

loss_fn = mse_loss
RATES = torch.tensor([[1.0], [0.9], [1.2]])


class Balance(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("rates", RATES.clone())

    def forward(self, amounts):
        credit, debit = (amounts @ self.rates).squeeze(-1).sum(-1).unbind(-1)
        return (credit - debit) / 30.0


class Books(nn.Module):
    def __init__(self):
        super().__init__()
        self.balance = Balance()
        self.body = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, amounts):
        return self.body(self.balance(amounts).unsqueeze(-1))


def build_model():
    return Books()


def build_optimizer(model):
    return adam(model, 1e-2)


def build_data(batch_size):
    def make(n):
        amounts = 8.0 + 0.7 * torch.randn(n, 2, 256, 3)
        totals = (amounts - 8.0).sum(2) @ RATES
        balance = (totals[:, 0] - totals[:, 1]) / 30.0
        return amounts, torch.tanh(1.5 * balance) + 0.25 * torch.randn(n, 1)

    return batches(batch_size, make)
