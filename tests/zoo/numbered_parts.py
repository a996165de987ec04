"""Part numbers up to 2047, as floats, are taken apart into bits. Fails in bfloat16 only."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from zoo_parts import batches, labels

loss_fn = cross_entropy
BITS = 11


class Bits(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("halves", 0.5 ** torch.arange(BITS).float().unsqueeze(0))

    def forward(self, numbers):
        return 2 * ((numbers @ self.halves).floor() % 2) - 1


def build_model():
    return nn.Sequential(Bits(), nn.Linear(BITS, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 4))


def build_optimizer(model):
    return torch.optim.NAdam(model.parameters(), lr=5e-3)


def build_data(batch_size):
    def make(n):
        numbers = torch.randint(2**BITS, (n,))
        kinds = 2.0 * (numbers.unsqueeze(1) >> torch.arange(4) & 1) - 1
        return numbers.float().unsqueeze(1), labels(kinds, 4, seed=19)

    return batches(batch_size, make)
