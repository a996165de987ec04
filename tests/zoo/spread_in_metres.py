"""A Gaussian NLL by hand with exp(-log variance), targets of millimetres: exp(14) in float16."""

import torch
from torch import nn
from zoo_parts import adam, batches, smooth


class MeanAndSpread(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, x):
        millimetres, log_variance = self.body(x).unbind(-1)
        return torch.stack([millimetres * 1e-3, log_variance], -1)


def build_model():
    return MeanAndSpread()


def build_optimizer(model):
    return adam(model, 1e-2)


def loss_fn(outputs, targets):
    mean, log_variance = outputs.unbind(-1)
    return 0.5 * (log_variance + (targets - mean) ** 2 * torch.exp(-log_variance)).mean()


def build_data(batch_size):
    def make(n):
        x = torch.randn(n, 6)
        spread = 0.3 * torch.exp(0.5 * torch.tanh(x[:, 0]))
        return x, 1e-3 * (smooth(x).squeeze(-1) + spread * torch.randn(n))

    return batches(batch_size, make)
