"""A recurrent integrator whose state passes through a matrix product at every step."""

import torch
from field_parts import batches, fixed
from torch import nn
from torch.nn.functional import mse_loss

TRUTH_STEPS = 300


class Integrator(nn.Module):
    def __init__(self, inputs=4, states=16):
        super().__init__()
        self.into, self.out = nn.Linear(inputs, states), nn.Linear(states, 1)
        self.carry = nn.Parameter(torch.eye(states))

    def forward(self, x):
        drive = 0.02 * self.into(x)
        state = torch.ones(x.shape[0], drive.shape[-1], device=x.device)
        for step in range(x.shape[1]):
            state = state @ self.carry + drive[:, step]
        return self.out(state).squeeze(-1)


def build_model():
    return Integrator()


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=3e-3)


def build_data(batch_size):
    def make(n):
        x = 0.3 + torch.randn(n, 32, 4)
        return x, (x @ fixed(4)).sum(1) / 6

    return batches(batch_size, make)


loss_fn = mse_loss
