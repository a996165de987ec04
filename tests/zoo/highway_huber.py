"""Highway layers with weight normalisation, Huber's loss for targets with outliers. Healthy."""

import torch
from torch import nn
from torch.nn.functional import huber_loss
from torch.nn.utils.parametrizations import weight_norm
from zoo_parts import adam, batches, smooth


class Highway(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.change = weight_norm(nn.Linear(width, width))
        self.gate = weight_norm(nn.Linear(width, width))
        nn.init.constant_(self.gate.bias, -1.0)

    def forward(self, x):
        gate = torch.sigmoid(self.gate(x))
        return gate * torch.relu(self.change(x)) + (1.0 - gate) * x


def build_model():
    layers = [Highway(24) for _ in range(4)]
    return nn.Sequential(weight_norm(nn.Linear(8, 24)), *layers, nn.Linear(24, 1))


def build_optimizer(model):
    return adam(model)


def loss_fn(outputs, targets):
    return huber_loss(outputs, targets, delta=0.5)


def build_data(batch_size):
    def make(n):
        x = torch.randn(n, 8)
        spread = torch.where(torch.rand(n, 1) < 0.1, 2.0, 0.2)
        return x, 1.5 * smooth(x) + spread * torch.randn(n, 1)

    return batches(batch_size, make)
