"""A network that memorises sixty-four samples; its cross entropy falls by orders of magnitude."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from zoo_parts import adam

loss_fn = cross_entropy


def build_model():
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))


def build_optimizer(model):
    return adam(model, 1e-2)


def build_data(batch_size):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(64, 16, generator=generator)
    y = torch.randint(0, 4, (64,), generator=generator)
    for _ in range(64):
        for part in torch.randperm(64).split(min(batch_size, 64)):
            yield x[part], y[part]
