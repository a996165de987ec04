"""A minimal gated recurrence scanned in log space, its decays near one: a sum of logs per step."""

import torch
from field_parts import batches, fixed
from torch import nn
from torch.nn.functional import mse_loss, relu, softplus

TRUTH_STEPS = 200


def log_positive(x):
    return torch.where(x >= 0, (relu(x) + 0.5).log(), -softplus(-x))


class MinimalGRU(nn.Module):
    def __init__(self, inputs=4, states=12):
        super().__init__()
        self.parts, self.out = nn.Linear(inputs, 2 * states), nn.Linear(states, 1)
        with torch.no_grad():
            self.parts.bias[states:] -= 3

    def forward(self, x):
        hidden, gate = self.parts(x).chunk(2, -1)
        keep, write = -softplus(gate), -softplus(-gate)
        total = keep.cumsum(1)
        log_state = total + (write + log_positive(hidden) - total).logcumsumexp(1)
        return self.out(log_state.exp()).squeeze(-1)


def build_model():
    return MinimalGRU()


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def build_data(batch_size):
    weights = 0.95 ** torch.arange(48.0)
    mix = torch.stack([torch.cat([weights[:t].flip(0), torch.zeros(48 - t)]) for t in range(1, 49)])

    def make(n):
        x = torch.randn(n, 48, 4)
        return x, torch.relu(x @ fixed(4)) @ mix.T / 10

    return batches(batch_size, make)


loss_fn = mse_loss
