"""A loss that is summed over the batch: large gradients, plain SGD with a rate to match."""

from torch import nn, optim, randn
from zoo_parts import batches, smooth


def build_model():
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))


def loss_fn(outputs, targets):
    return ((outputs - targets) ** 2).sum()


def build_optimizer(model):
    return optim.SGD(model.parameters(), lr=1e-3)


def build_data(batch_size):
    def make(n):
        x = randn(n, 8)
        return x, smooth(x)

    return batches(batch_size, make)
