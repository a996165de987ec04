"""A GRU cell called in a loop, with clipping."""

import torch
from torch import nn
from zoo_parts import adam, batches

CLIP_GRAD_NORM = 0.5
build_optimizer = adam


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(3, 16)
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        state = x.new_zeros(x.shape[0], 16)
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
        return self.head(state)


def build_model():
    return Reader()


def loss_fn(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)


def build_data(batch_size):
    def make(n):
        x = torch.randn(n, 6, 3)
        return x, (x[:, :, 0].sum(1) > 0).long()

    return batches(batch_size, make)
