"""A VAE that divides by its own error: sum reductions and the optimal variance of sigma-VAE."""

import torch
from field_parts import batches, fixed, perceptron
from torch import nn

TRUTH_STEPS = 500


class Calibrated(nn.Module):
    def __init__(self, pixels=64, latents=4):
        super().__init__()
        self.encoder = perceptron(pixels, 64, 2 * latents, nn.SiLU)
        self.decoder = perceptron(latents, 64, pixels, nn.SiLU)

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, -1)
        code = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
        return self.decoder(code), divergence


def build_model():
    return Calibrated()


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=3e-3)


def build_data(batch_size):
    def make(n):
        return 0.5 + 0.5 * torch.tanh(torch.randn(n, 2) @ fixed(2, 64) / 2)

    return batches(batch_size, make)


def training_step(model, x):
    again, divergence = model(x)
    log_sigma = (x - again).square().mean().sqrt().log()
    log_sigma = -6 + torch.nn.functional.softplus(log_sigma + 6)
    error = 0.5 * ((x - again) / log_sigma.exp()).square() + log_sigma
    return (error.sum() + divergence) / len(x)
