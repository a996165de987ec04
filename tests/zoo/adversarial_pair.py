"""A generator and a critic in one model, trained against each other by a sign."""

import torch
from torch import nn
from torch.nn.functional import softplus
from zoo_parts import batches, teacher


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6))
        self.critic = nn.Sequential(nn.Linear(6, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))

    def forward(self, real):
        made = self.generator(torch.randn(len(real), 4, device=real.device))
        return self.critic(real), self.critic(Reverse.apply(made))


def build_model():
    return Pair()


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.99))


def training_step(model, batch):
    real, made = model(batch)
    return softplus(-real).mean() + softplus(made).mean()


def build_data(batch_size):
    return batches(batch_size, lambda n: torch.randn(n, 4) @ teacher(4, 6) + 0.5)
