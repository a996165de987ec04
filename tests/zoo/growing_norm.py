"""The same norm on activations that grow while training: it overflows only after a while."""

import torch
from torch import nn
from zoo_parts import adam, batches, teacher


class HastyNorm(nn.Module):
    def forward(self, x):
        return x / (1e-3 + (x * x).mean(-1, keepdim=True).sqrt())


class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = HastyNorm()
        self.direction, self.size = nn.Linear(16, 4), nn.Linear(16, 1)

    def forward(self, x):
        hidden = 40.0 * self.first(x)
        return self.direction(self.norm(hidden)), self.size(hidden)


def build_model():
    return Growing()


def loss_fn(outputs, targets):
    direction, size = outputs
    return ((direction - targets[0]) ** 2).mean() + 1e-5 * ((size - targets[1]) ** 2).mean()


def build_optimizer(model):
    return adam(model, 2e-2)


def build_data(batch_size):
    def make(n):
        x = torch.randn(n, 8)
        return x, (x @ teacher(8, 4), 600.0 * (x @ teacher(8, 1, seed=4)))

    return batches(batch_size, make)
