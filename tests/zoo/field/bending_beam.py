"""A physics-informed beam: the curvature by autograd twice, fixed ends, no data."""

import math

import torch
from field_parts import batches, perceptron

TRUTH_STEPS = 600


def build_model():
    return perceptron(1, 32, 1)


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=3e-3)


def build_data(batch_size):
    return batches(batch_size, lambda n: torch.rand(n, 1))


def training_step(model, points):
    x = points.requires_grad_()
    bend = model(x)
    (slope,) = torch.autograd.grad(bend.sum(), x, create_graph=True)
    (curve,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
    load = math.pi**2 * torch.sin(math.pi * x)
    ends = model(torch.tensor([[0.0], [1.0]], device=x.device))
    return (curve + load).square().mean() + 10 * ends.square().mean()
