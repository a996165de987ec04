"""A convolutional net with BatchNorm, whose batch may not be split."""

import digits
from torch import nn

BATCH_SIZE = 32


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )


def build_data(batch_size):
    return digits.batches(batch_size, 1, 8, 8)


def loss_fn(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)
