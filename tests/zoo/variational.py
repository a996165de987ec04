"""A variational autoencoder: random numbers inside the model, the loss in training_step."""

import torch
from torch import nn
from zoo_parts import adam, batches, teacher

build_optimizer = adam


class Variational(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 6))
        self.decode = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 16))

    def forward(self, x):
        mean, log_variance = self.encode(x).chunk(2, -1)
        hidden = mean + torch.exp(0.5 * log_variance) * torch.randn_like(mean)
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(-1)
        return self.decode(hidden), divergence


def build_model():
    return Variational()


def training_step(model, batch):
    rebuilt, divergence = model(batch)
    return ((rebuilt - batch) ** 2).sum(-1).mean() + 0.1 * divergence.mean()


def build_data(batch_size):
    return batches(batch_size, lambda n: torch.randn(n, 3) @ teacher(3, 16))
