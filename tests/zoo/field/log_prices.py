"""The log of flat prices of some hundred thousand, learned as it is: twelve and a little."""

import torch
from field_parts import batches, perceptron, smooth
from torch import nn
from torch.nn.functional import mse_loss

TRUTH_STEPS = 600


class Prices(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = perceptron(5, 64, 1)
        with torch.no_grad():
            self.body[-1].bias.fill_(12.2)

    def forward(self, x):
        return self.body(x).squeeze(-1)


def build_model():
    return Prices()


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=5e-3)


def build_data(batch_size):
    def make(n):
        x = torch.randn(n, 5)
        price = torch.exp(12.2 + 0.35 * smooth(x) + 0.01 * torch.randn(n))
        return x, price.round()

    return batches(batch_size, make)


def loss_fn(outputs, prices):
    return mse_loss(outputs, torch.log1p(prices))
