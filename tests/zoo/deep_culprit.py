"""Eight residual blocks, one of which holds a hasty norm: a needle to be found."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from zoo_parts import adam, batches, labels

loss_fn = cross_entropy


class HastyNorm(nn.Module):
    def forward(self, x):
        x = x * 600.0
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm
        self.up, self.act, self.down = nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


def build_model():
    norms = [nn.LayerNorm(16) if place != 5 else HastyNorm() for place in range(8)]
    return nn.Sequential(nn.Linear(12, 16), *(Block(norm) for norm in norms), nn.Linear(16, 4))


def build_optimizer(model):
    return adam(model, 2e-3)


def build_data(batch_size):
    def make(n):
        x = torch.randn(n, 12)
        return x, labels(x)

    return batches(batch_size, make)
