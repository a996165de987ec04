"""A hand-written normalisation that overflows float16, and is mended by one island."""

import digits
import torch
from torch import nn

BATCH_SIZE = 32


class OwnNorm(nn.Module):
    def forward(self, x):
        x = 400 * x
        return x / ((x * x).mean(-1, keepdim=True) + 1).sqrt()


def build_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), OwnNorm(), nn.Linear(64, 10))


def build_data(batch_size):
    return digits.batches(batch_size, 64)


def loss_fn(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)
