"""A diagonal state-space scan with slow poles; its state is float32 by promotion: healthy."""

import torch
from field_parts import batches, fixed
from torch import nn
from torch.nn.functional import mse_loss

TRUTH_STEPS = 200


class Scan(nn.Module):
    def __init__(self, inputs=4, states=16):
        super().__init__()
        self.into, self.out = nn.Linear(inputs, states), nn.Linear(states, 1)
        self.log_rate = nn.Parameter(torch.linspace(-6.0, -1.0, states))

    def forward(self, x):
        keep = torch.exp(-torch.exp(self.log_rate))
        drive = self.into(x)
        state = torch.zeros(x.shape[0], drive.shape[-1], device=x.device)
        for step in range(x.shape[1]):
            state = keep * state + (1 - keep) * drive[:, step]
        return self.out(state).squeeze(-1)


def build_model():
    return Scan()


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def build_data(batch_size):
    def make(n):
        x = torch.randn(n, 16, 4)
        weights = 0.95 ** torch.arange(15, -1, -1.0)
        return x, (x @ fixed(4) * weights).sum(1) / 3

    return batches(batch_size, make)


loss_fn = mse_loss
