"""A denoiser with an embedding of the time predicts the noise added to points. Healthy."""

import torch
from torch import nn
from torch.nn.functional import mse_loss, silu
from zoo_parts import batches

loss_fn = mse_loss


class Denoiser(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.register_buffer("pace", torch.logspace(0, 1.2, 8))
        self.time = nn.Sequential(nn.Linear(16, width), nn.SiLU(), nn.Linear(width, width))
        self.first = nn.Linear(4, width)
        self.norm = nn.LayerNorm(width)
        self.second = nn.Linear(width, width)
        self.last = nn.Linear(width, 4)

    def forward(self, noisy_and_time):
        noisy, time = noisy_and_time.split([4, 1], -1)
        phase = time * self.pace
        embedded = self.time(torch.cat([phase.sin(), phase.cos()], -1))
        hidden = silu(self.first(noisy) + embedded)
        hidden = hidden + silu(self.second(self.norm(hidden)) + embedded)
        return self.last(hidden)


def build_model():
    return Denoiser()


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=2e-3)


def build_data(batch_size):
    def make(n):
        turn = 6.28 * torch.rand(n, 1)
        clean = torch.cat([turn.cos(), turn.sin(), (2 * turn).cos(), (2 * turn).sin()], 1)
        time, noise = torch.rand(n, 1), torch.randn(n, 4)
        angle = torch.pi / 2 * time
        return torch.cat([angle.cos() * clean + angle.sin() * noise, time], 1), noise

    return batches(batch_size, make)
