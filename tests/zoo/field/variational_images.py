"""A VAE with a log-variance and its exp under autocast: healthy though it looks dangerous."""

import torch
from field_parts import batches, fixed, perceptron
from torch import nn
from torch.nn.functional import mse_loss

TRUTH_STEPS = 300


class Variational(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = perceptron(32, 64, 8, nn.ReLU), perceptron(4, 64, 32, nn.ReLU)

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, -1)
        code = mean + torch.exp(log_variance / 2) * torch.randn_like(mean)
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(-1) / 2
        return self.decoder(code), divergence


def build_model():
    return Variational()


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=2e-3)


def build_data(batch_size):
    return batches(batch_size, lambda n: torch.tanh(torch.randn(n, 4) @ fixed(4, 32)))


def training_step(model, x):
    again, divergence = model(x)
    return mse_loss(again, x, reduction="sum") / len(x) + 0.1 * divergence.mean()
