"""A model that makes a tensor on the CPU in forward: the user's own error on a GPU."""

import digits
import torch
from torch import nn


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, images):
        return self.layer(images * torch.linspace(0, 1, 64))


def build_model():
    return Scaled()


def build_data(batch_size):
    return digits.batches(batch_size, 64)


def loss_fn(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)
