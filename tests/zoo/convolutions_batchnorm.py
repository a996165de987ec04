"""A small convolutional network with BatchNorm and max pooling."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from zoo_parts import adam, batches

loss_fn = cross_entropy
build_optimizer = adam


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(128, 3),
    )


def build_data(batch_size):
    def make(n):
        kinds = torch.randint(0, 3, (n,))
        rows = torch.arange(8.0)
        waves = torch.stack([torch.sin(rows * f) for f in (0.7, 1.4, 2.1)])[kinds]
        images = waves[:, None, :, None] + 0.7 * torch.randn(n, 1, 8, 8)
        return images, kinds

    return batches(batch_size, make)
