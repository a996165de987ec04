"""Learned Fourier features up to 2**9 pi, the angles from a matrix product: lost in 16 bits."""

import math

import torch
from field_parts import batches, perceptron
from torch import nn
from torch.nn.functional import mse_loss

TRUTH_STEPS = 480


class Field(nn.Module):
    def __init__(self, octaves=10):
        super().__init__()
        self.frequencies = nn.Parameter(math.pi * 2.0 ** torch.arange(octaves)[None])
        self.body = perceptron(2 * octaves, 48, 1, nn.ReLU)

    def forward(self, x):
        angles = x @ self.frequencies
        return self.body(torch.cat([angles.sin(), angles.cos()], -1)).squeeze(-1)


def build_model():
    return Field()


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=3e-3)


def build_data(batch_size):
    def make(n):
        x = torch.rand(n, 1)
        return x, (torch.sin(40 * x) + 0.5 * torch.sin(300 * x + 1)).squeeze(-1)

    return batches(batch_size, make)


loss_fn = mse_loss
