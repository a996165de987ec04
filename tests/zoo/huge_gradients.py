"""A loss in large units: the usual scale throws twenty steps away."""

from torch import nn, optim, randn
from zoo_parts import batches, smooth

LARGE = 2.0**18


def build_model():
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def loss_fn(outputs, targets):
    return ((outputs - targets) ** 2).mean() * LARGE


def build_optimizer(model):
    return optim.SGD(model.parameters(), lr=0.1 / LARGE, momentum=0.9)


def build_data(batch_size):
    def make(n):
        x = randn(n, 8)
        return x, smooth(x)

    return batches(batch_size, make)
