"""A noiseless linear problem: the loss goes to nothing, and what divides by it explodes."""

from torch import nn, optim, randn
from torch.nn.functional import mse_loss
from zoo_parts import batches, teacher

loss_fn = mse_loss


def build_model():
    return nn.Linear(8, 4)


def build_optimizer(model):
    return optim.SGD(model.parameters(), lr=0.4)


def build_data(batch_size):
    def make(n):
        x = randn(n, 8)
        return x, x @ teacher(8, 4)

    return batches(batch_size, make)
