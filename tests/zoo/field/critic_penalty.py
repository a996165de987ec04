"""A Wasserstein critic with a gradient penalty, differentiated twice under autocast."""

import torch
from field_parts import batches, perceptron
from torch import nn

TRUTH_STEPS = 300


def build_model():
    return perceptron(8, 64, 1, nn.SiLU)


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.5, 0.9))


def build_data(batch_size):
    def make(n):
        return torch.randn(n, 8) + 1, torch.randn(n, 8) * 1.5, torch.rand(n, 1)

    return batches(batch_size, make)


def training_step(model, batch):
    real, fake, mix = batch
    between = (mix * real + (1 - mix) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
    penalty = (slope.norm(dim=-1) - 1).square().mean()
    return model(fake).mean() - model(real).mean() + 10 * penalty
