"""A learning rate so large that training is chaotic: noise alone drives runs apart."""

from torch import nn, optim, randn
from torch.nn.functional import cross_entropy
from zoo_parts import batches, labels

loss_fn = cross_entropy


def build_model():
    return nn.Sequential(
        nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)
    )


def build_optimizer(model):
    return optim.SGD(model.parameters(), lr=1.5, momentum=0.8)


def build_data(batch_size):
    def make(n):
        x = randn(n, 12)
        return x, labels(x)

    return batches(batch_size, make)
