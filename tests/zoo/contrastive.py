"""Two views of a sample are to agree: F.normalize, similarities, a temperature."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from zoo_parts import adam, batches


def build_model():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))


def build_optimizer(model):
    return adam(model, 2e-3)


def training_step(model, batch):
    first, second = (normalize(model(view), dim=-1) for view in batch)
    similarity = first.float() @ second.float().T / 0.2
    return cross_entropy(similarity, torch.arange(len(similarity), device=similarity.device))


def build_data(batch_size):
    def make(n):
        x = torch.randn(n, 16)
        return x + 0.3 * torch.randn(n, 16), x + 0.3 * torch.randn(n, 16)

    return batches(batch_size, make)
