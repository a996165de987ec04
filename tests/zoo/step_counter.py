"""Parity and remainder of a counter beyond 2048, held in a sixteen-bit activation. Silent."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from zoo_parts import adam, batches

loss_fn = cross_entropy
build_optimizer = adam


class Remainders(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(1, 1, bias=False)
        nn.init.ones_(self.scale.weight)
        self.scale.weight.requires_grad_(False)

    def forward(self, count):
        count = self.scale(count)
        return torch.cat([(count % base) / base for base in (2, 3, 5)], -1)


def build_model():
    return nn.Sequential(Remainders(), nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 6))


def build_data(batch_size):
    def make(n):
        count = torch.randint(2048, 8192, (n, 1))
        return count.float(), (count % 2 + 2 * (count % 3)).squeeze(1)

    return batches(batch_size, make)
