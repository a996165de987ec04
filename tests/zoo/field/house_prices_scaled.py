"""The same prices, put into their units by the loss, which is float32: healthy."""

import torch
from field_parts import batches, perceptron, smooth
from torch.nn.functional import mse_loss

TRUTH_STEPS = 400


def build_model():
    return perceptron(8, 64, 1)


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=3e-3)


def build_data(batch_size):
    def make(n):
        x = torch.randn(n, 8)
        return x, 1e4 + 100 * smooth(x)

    return batches(batch_size, make)


def loss_fn(outputs, prices):
    return mse_loss(1e4 + 100 * outputs.squeeze(-1), prices)
