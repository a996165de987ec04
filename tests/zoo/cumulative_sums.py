"""torch.cumsum of many increments, the differences of which are the prediction."""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from zoo_parts import adam, batches, smooth

loss_fn = mse_loss


class Integral(nn.Module):
    def forward(self, x):
        total = torch.cumsum(x + 2.0, 1)
        return (total[:, 8:] - total[:, :-8]) / 8 - 2.0


class Windows(nn.Module):
    def __init__(self):
        super().__init__()
        self.each = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        self.integral = Integral()

    def forward(self, x):
        return self.integral(self.each(x).squeeze(-1))


def build_model():
    return Windows()


def build_optimizer(model):
    return adam(model, 1e-2)


def build_data(batch_size):
    def make(n):
        x = torch.randn(n, 128, 4)
        return x, smooth(x).squeeze(-1).unfold(1, 8, 1).mean(-1)[:, 1:]

    return batches(min(batch_size, 16), make)
