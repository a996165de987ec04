"""A first layer that is fed seconds: neighbours in time become one number. Silent."""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from zoo_parts import batches

loss_fn = mse_loss


class Clock(nn.Module):
    def __init__(self):
        super().__init__()
        self.read = nn.Linear(2, 8, bias=False)
        with torch.no_grad():
            self.read.weight.copy_(
                torch.tensor([[1.0, -1.0]]).repeat(8, 1) / torch.arange(1.0, 9.0)[:, None]
            )
        self.body = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, times):
        return self.body(self.read(times))


def build_model():
    return Clock()


def build_optimizer(model):
    body = torch.optim.Adam(model.body.parameters(), lr=1e-2)
    model.read.weight.requires_grad_(False)
    return body


def build_data(batch_size):
    def make(n):
        start = torch.randint(0, 3600, (n, 1)).float()
        length = 6 * torch.rand(n, 1)
        return torch.cat([start + length, start], 1), torch.sin(length)

    return batches(batch_size, make)
