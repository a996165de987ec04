"""A training step whose loss multiplies matrices: autocast runs them in sixteen bits. Silent."""

import torch
from torch import nn
from zoo_parts import adam, batches, smooth

build_optimizer = adam


def build_model():
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4))


def training_step(model, batch):
    inputs, targets = batch
    outputs = model(inputs)
    a, b = outputs + 20.0, targets + 20.0
    products = (a.unsqueeze(1) @ b.unsqueeze(2)).reshape(-1)
    squares = (a.unsqueeze(1) @ a.unsqueeze(2) + b.unsqueeze(1) @ b.unsqueeze(2)).reshape(-1)
    return (squares - 2.0 * products).mean()


def build_data(batch_size):
    def make(n):
        x = torch.randn(n, 6)
        return x, smooth(x, 4)

    return batches(batch_size, make)
