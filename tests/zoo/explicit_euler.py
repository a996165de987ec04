"""Sixty small explicit steps from a large state: in bfloat16 nothing moves. Silent."""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from zoo_parts import adam, batches, smooth

loss_fn = mse_loss


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.slope = nn.Linear(8, 8)

    def forward(self, start):
        state = start
        for _ in range(60):
            state = state + 0.012 * torch.tanh(self.slope(state))
        return state - start


def build_model():
    start = nn.Linear(4, 8)
    nn.init.constant_(start.bias, 6.0)
    return nn.Sequential(start, Flow(), nn.Linear(8, 1))


def build_optimizer(model):
    return adam(model, 1e-2)


def build_data(batch_size):
    def make(n):
        x = torch.randn(n, 4)
        return x, smooth(x)

    return batches(batch_size, make)
