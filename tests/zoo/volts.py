"""Signals of microvolts given and returned in volts: a loss of 1e-12, no gradients in float16."""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from zoo_parts import batches

loss_fn = mse_loss
MICRO = 1e-6


class Cleaner(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(2, 12, 5, padding=2),
            nn.GELU(),
            nn.Conv1d(12, 12, 5, padding=2),
            nn.GELU(),
            nn.Conv1d(12, 2, 5, padding=2),
        )

    def forward(self, volts):
        return self.body(volts / MICRO) * MICRO


def build_model():
    return Cleaner()


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=5e-3, eps=1e-16)


def build_data(batch_size):
    time = torch.arange(32) / 32 * 6.2832

    def make(n):
        rhythm, phase = 1.0 + 3.0 * torch.rand(n, 2, 1), 6.2832 * torch.rand(n, 2, 1)
        clean = torch.sin(rhythm * time + phase)
        return MICRO * (clean + 0.7 * torch.randn(n, 2, 32)), MICRO * clean

    return batches(batch_size, make)
