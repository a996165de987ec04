"""A recurrence's gate is sigmoid(x + 6) and its input 1 - gate. Fails in bfloat16 only, silent."""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from zoo_parts import batches, teacher

STEPS, FEATURES, WIDTH = 64, 6, 48


class SlowMemory(nn.Module):
    """A gated linear recurrence that forgets over some hundreds of steps."""

    def forward(self, values, gates):
        gates = torch.sigmoid(gates + 6.0)
        state = torch.zeros_like(values[:, 0])
        for value, gate in zip(values.unbind(1), gates.unbind(1), strict=True):
            state = gate * state + (1 - gate) * value
        return state


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Sequential(nn.Linear(FEATURES, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())
        self.mix = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=4)
        self.values, self.gates = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.memory = SlowMemory()
        self.head = nn.Sequential(
            nn.LayerNorm(WIDTH, eps=1e-4), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 2)
        )

    def forward(self, x):
        lifted = self.lift(x)
        lifted = lifted + self.mix(lifted.transpose(1, 2)).transpose(1, 2)
        return self.head(self.memory(10 * self.values(lifted), self.gates(lifted)))


loss_fn = mse_loss


def build_model():
    return Reader()


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=3e-3)


def build_data(batch_size):
    def make(n):
        level = torch.randn(n, 1, FEATURES)
        x = level + torch.randn(n, STEPS, FEATURES)
        return x, torch.tanh(x.mean(1) @ teacher(FEATURES, 2, seed=19))

    return batches(batch_size, make)
