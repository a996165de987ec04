"""A multilayer perceptron that regresses a smooth function."""

from torch import nn, randn
from torch.nn.functional import mse_loss
from zoo_parts import adam, batches, smooth

loss_fn = mse_loss
build_optimizer = adam


def build_model():
    return nn.Sequential(
        nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)
    )


def build_data(batch_size):
    def make(n):
        x = randn(n, 12)
        return x, smooth(x)

    return batches(batch_size, make)
