"""A PointNet: the same MLP for every point, a maximum over points, smoothed labels. Healthy."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from zoo_parts import adam, batches


class PointNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.point = nn.Sequential(nn.Linear(3, 24), nn.ReLU(), nn.Linear(24, 48), nn.ReLU())
        self.cloud = nn.Sequential(nn.Linear(48, 24), nn.ReLU(), nn.Linear(24, 4))

    def forward(self, points):
        return self.cloud(self.point(points).max(1).values)


def build_model():
    return PointNet()


def build_optimizer(model):
    return adam(model)


def loss_fn(outputs, targets):
    return cross_entropy(outputs, targets, label_smoothing=0.1)


def build_data(batch_size):
    axes = torch.tensor([[1.0, 1.0, 1.0], [1.2, 1.2, 0.5], [1.4, 0.6, 0.6], [0.6, 0.9, 1.4]])

    def make(n):
        kind = torch.randint(4, (n,))
        size = 0.8 + 0.4 * torch.rand(n, 1, 1)
        return size * axes[kind].unsqueeze(1) * torch.randn(n, 24, 3), kind

    return batches(batch_size, make)
