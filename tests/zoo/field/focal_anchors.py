"""Focal loss over anchors as detectors write it: a sigmoid, a clamp to 1 - 1e-6, two logs."""

import torch
from field_parts import batches, fixed, perceptron
from torch import nn

TRUTH_STEPS = 300


class Anchors(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = perceptron(16, 64, 1, nn.ReLU)
        with torch.no_grad():
            self.body[-1].bias.fill_(-2.0)

    def forward(self, x):
        return self.body(x).squeeze(-1)


def build_model():
    return Anchors()


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def build_data(batch_size):
    def make(n):
        x = torch.randn(n, 16, 16)
        return x, (x @ fixed(16) / 4 > 1.2).float()

    return batches(batch_size, make)


def training_step(model, batch):
    x, y = batch
    chance = torch.sigmoid(model(x)).clamp(1e-6, 1 - 1e-6)
    hit = -0.25 * (1 - chance).pow(2) * y * chance.log()
    miss = -0.75 * chance.pow(2) * (1 - y) * (1 - chance).log()
    return (hit + miss).sum() / y.sum().clamp(min=1)
