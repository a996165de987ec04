"""An autoencoder of binary patterns with the stable form of binary cross entropy."""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from zoo_parts import adam, batches, teacher

loss_fn = binary_cross_entropy_with_logits
build_optimizer = adam


def build_model():
    return nn.Sequential(
        nn.Linear(24, 32),
        nn.ReLU(),
        nn.Linear(32, 4),
        nn.Linear(4, 32),
        nn.ReLU(),
        nn.Linear(32, 24),
    )


def build_data(batch_size):
    def make(n):
        x = (torch.randn(n, 4) @ teacher(4, 24) > 0).float()
        return x, x

    return batches(batch_size, make)
