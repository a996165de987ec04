"""A multilayer perceptron with GELU and cross entropy, momentum SGD."""

from torch import nn, optim, randn
from torch.nn.functional import cross_entropy
from zoo_parts import batches, labels

loss_fn = cross_entropy


def build_model():
    return nn.Sequential(
        nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 4)
    )


def build_optimizer(model):
    return optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def build_data(batch_size):
    def make(n):
        x = randn(n, 16)
        return x, labels(x)

    return batches(batch_size, make)
