"""Three quantiles by the pinball loss, from a network modulated by a condition (FiLM). Healthy."""

import torch
from torch import nn
from zoo_parts import adam, batches, smooth

LEVELS = (0.1, 0.5, 0.9)


class Film(nn.Module):
    def __init__(self, width, condition):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.modulate = nn.Linear(condition, 2 * width)

    def forward(self, x, condition):
        scale, shift = self.modulate(condition).chunk(2, -1)
        return x + torch.relu(self.linear(x) * (1.0 + scale) + shift)


class Forecast(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 32)
        self.films = nn.ModuleList([Film(32, 3), Film(32, 3)])
        self.head = nn.Linear(32, len(LEVELS))

    def forward(self, inputs):
        x, condition = inputs
        x = self.first(x)
        for film in self.films:
            x = film(x, condition)
        return self.head(x)


def build_model():
    return Forecast()


def build_optimizer(model):
    return adam(model, 3e-3)


def loss_fn(outputs, targets):
    levels = torch.tensor(LEVELS, device=outputs.device)
    error = targets - outputs
    return torch.maximum(levels * error, (levels - 1.0) * error).mean()


def build_data(batch_size):
    def make(n):
        x, condition = torch.randn(n, 6), torch.randn(n, 3)
        spread = 0.2 + 0.6 * torch.sigmoid(2.0 * condition[:, :1])
        y = smooth(x) * (1.0 + torch.tanh(condition[:, 1:2])) + spread * torch.randn(n, 1)
        return (x, condition), y

    return batches(batch_size, make)
