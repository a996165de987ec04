"""An autoencoder with a codebook and straight-through gradients, as in VQ-VAE. Healthy."""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from zoo_parts import adam, batches, teacher

CODES, WIDTH, SLOTS = 16, 4, 3


def loss_fn(outputs, targets):
    rebuilt, encoded, chosen = outputs
    commitment = mse_loss(encoded, chosen.detach())
    codebook = mse_loss(chosen, encoded.detach())
    return mse_loss(rebuilt, targets) + codebook + 0.25 * commitment


class Quantised(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, SLOTS * WIDTH))
        self.decoder = nn.Sequential(nn.Linear(SLOTS * WIDTH, 32), nn.ReLU(), nn.Linear(32, 16))
        self.codes = nn.Embedding(CODES, WIDTH)
        nn.init.normal_(self.codes.weight, std=0.3)

    def forward(self, x):
        encoded = self.encoder(x).unflatten(-1, (SLOTS, WIDTH))
        apart = (encoded.detach().unsqueeze(-2) - self.codes.weight.detach()).square().sum(-1)
        chosen = self.codes(apart.argmin(-1))
        passed = encoded + (chosen - encoded).detach()
        return self.decoder(passed.flatten(1)), encoded, chosen


def build_model():
    return Quantised()


def build_optimizer(model):
    return adam(model, 4e-3)


def build_data(batch_size):
    parts = 2 * teacher(6, 16, seed=21), 2 * teacher(6, 16, seed=22)

    def make(n):
        first, second = torch.randint(6, (2, n))
        return (clean := parts[0][first] + parts[1][second]) + 0.1 * torch.randn(n, 16), clean

    return batches(batch_size, make)
