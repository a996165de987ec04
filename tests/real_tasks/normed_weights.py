"""Weight norm on a convolution, spectral norm on layers with buffers that every forward changes."""

import torch
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

BATCH_SIZE = 16
PATTERNS = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def build_model():
    return nn.Sequential(
        weight_norm(nn.Conv2d(1, 8, 3, padding=1)),
        nn.ReLU(),
        spectral_norm(nn.Conv2d(8, 16, 3, stride=2, padding=1)),
        nn.ReLU(),
        nn.Flatten(),
        spectral_norm(nn.Linear(256, 32)),
        nn.ReLU(),
        orthogonal(nn.Linear(32, 32)),
        weight_norm(nn.Linear(32, 4)),
    )


def build_data(batch_size):
    for _ in range(400):
        labels = torch.randint(4, (batch_size,))
        yield PATTERNS[labels] + torch.randn(batch_size, 1, 8, 8), labels


def loss_fn(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=2e-3)
