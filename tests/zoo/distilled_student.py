"""A small 1-d convolutional student is distilled from a teacher's logits by KL. Healthy."""

import torch
from torch import nn
from torch.nn.functional import conv1d, cross_entropy, kl_div, log_softmax, relu, softmax
from zoo_parts import batches, teacher

HOT = 2.0


def loss_fn(outputs, targets):
    soft = kl_div(log_softmax(outputs / HOT, -1), softmax(targets / HOT, -1), reduction="batchmean")
    return 0.8 * HOT**2 * soft + 0.2 * cross_entropy(outputs, targets.argmax(-1))


def build_model():
    return nn.Sequential(
        nn.Conv1d(1, 8, 5, padding=2),
        nn.InstanceNorm1d(8, affine=True),
        nn.PReLU(),
        nn.MaxPool1d(2),
        nn.Conv1d(8, 16, 5, padding=2),
        nn.BatchNorm1d(16),
        nn.PReLU(),
        nn.AdaptiveAvgPool1d(4),
        nn.Flatten(),
        nn.Linear(64, 5),
    )


def build_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)


def build_data(batch_size):
    filters = 2 * teacher(5, 5, seed=7).t().reshape(5, 1, 5)
    ticks = torch.arange(32.0)

    def make(n):
        pitch, phase = 0.2 + 2.6 * torch.rand(n, 1, 1), 6.28 * torch.rand(n, 1, 1)
        waves = 1.4 * torch.sin(pitch * ticks + phase) + 0.1 * torch.randn(n, 1, 32)
        logits = relu(conv1d(waves, filters)).mean(-1)
        return waves, 5 * (logits - logits.mean(-1, keepdim=True))

    return batches(batch_size, make)
