"""Noise prediction at steps 0 to 999, the step cast to the hidden dtype before its features."""

import math

import torch
from field_parts import batches, fixed
from torch import nn
from torch.nn.functional import mse_loss, silu

TRUTH_STEPS = 240


class Denoiser(nn.Module):
    def __init__(self, width=64, features=16):
        super().__init__()
        self.enter, self.leave = nn.Linear(8, width), nn.Linear(width, 8)
        self.frequencies = nn.Parameter(16 * torch.randn(features))
        self.time = nn.Sequential(
            nn.Linear(2 * features, width), nn.SiLU(), nn.Linear(width, width)
        )
        self.body = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, batch):
        noised, step = batch
        hidden = self.enter(noised)
        part = step.to(hidden.dtype) / 1000
        angles = 2 * math.pi * part[:, None] * self.frequencies[None]
        hidden = silu(hidden + self.time(torch.cat([angles.sin(), angles.cos()], -1)))
        return self.leave(hidden + self.body(hidden))


def build_model():
    return Denoiser()


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def build_data(batch_size):
    keep = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0)

    def make(n):
        clean = torch.tanh(torch.randn(4 * n, 2) @ fixed(2, 8))
        step, noise = torch.randint(1000, (4 * n,)), torch.randn(4 * n, 8)
        share = keep[step][:, None]
        return (share.sqrt() * clean + (1 - share).sqrt() * noise, step), noise

    return batches(batch_size, make)


loss_fn = mse_loss
