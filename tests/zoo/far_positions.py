"""Angles of positions up to 4096 by a matrix product, which runs in sixteen bits. Silent."""

import torch
from torch import nn
from torch.nn.functional import mse_loss
from zoo_parts import adam, batches

loss_fn = mse_loss
build_optimizer = adam


class Angles(nn.Module):
    def forward(self, places):
        frequencies = torch.tensor([1.0, 0.5, 0.2, 0.1, 0.02], device=places.device)
        angles = places[:, None] @ frequencies[None, :]
        return torch.cat([angles.sin(), angles.cos()], -1)


def build_model():
    return nn.Sequential(Angles(), nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))


def build_data(batch_size):
    def make(n):
        places = torch.randint(0, 4096, (n,)).float()
        return places, (torch.sin(places * 0.5) + torch.cos(places * 0.2))[:, None]

    return batches(batch_size, make)
