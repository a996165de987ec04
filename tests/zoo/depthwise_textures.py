"""Inverted residuals with depthwise convolutions tell how stripes are turned. Healthy."""

import torch
from torch import nn
from zoo_parts import batches

loss_fn = nn.CrossEntropyLoss(label_smoothing=0.1)


class Inverted(nn.Module):
    def __init__(self, channels, grow=2):
        super().__init__()
        wide = channels * grow
        self.body = nn.Sequential(
            nn.Conv2d(channels, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(),
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            nn.ReLU6(),
            nn.Conv2d(wide, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x):
        return x + self.body(x)


def build_model():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU6(),
        Inverted(8),
        Inverted(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )


def build_optimizer(model):
    rates = {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4}
    return torch.optim.SGD(model.parameters(), **rates)


def build_data(batch_size):
    rows, columns = torch.meshgrid(torch.arange(12.0), torch.arange(12.0), indexing="ij")

    def make(n):
        kinds = torch.randint(4, (n,))
        angle = (kinds * torch.pi / 4 + 0.1 * torch.randn(n)).view(n, 1, 1)
        pitch, phase = 1.0 + 0.3 * torch.rand(n, 1, 1), 6.28 * torch.rand(n, 1, 1)
        stripes = torch.sin(pitch * (angle.cos() * rows + angle.sin() * columns) + phase)
        colour = 0.5 + torch.rand(n, 3, 1, 1)
        return colour * stripes.unsqueeze(1) + 0.3 * torch.randn(n, 3, 12, 12), kinds

    return batches(batch_size, make)
