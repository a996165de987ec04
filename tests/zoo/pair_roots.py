"""Roots of squared distances, zero on the diagonal, with 1e-12 added. Fails in float16 only."""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from zoo_parts import batches

loss_fn = mse_loss


class Apart(nn.Module):
    def forward(self, points):
        gaps = points.unsqueeze(1) - points.unsqueeze(2)
        return torch.sqrt(torch.einsum("bijd,bijd->bij", gaps, gaps) + 1e-12)


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 4, bias=False)
        self.apart = Apart()
        self.force = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 8))
        self.last = nn.Sequential(nn.SiLU(), nn.Linear(8, 1))

    def forward(self, points):
        distances = self.apart(self.embed(points))
        return self.last(self.force(distances.unsqueeze(-1)).mean((1, 2)))


def build_model():
    return Pairs()


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def build_data(batch_size):
    def make(n):
        size = 0.3 + 1.2 * torch.rand(n, 1, 1)
        points = size * torch.randn(n, 8, 3)
        targets = torch.cdist(points, points).mean((1, 2)).unsqueeze(1)
        return points, torch.sin(1.5 * targets) + 0.03 * torch.randn(n, 1)

    return batches(batch_size, make)
