"""Targets from a slowly moving copy of the network, averaged in forward as in BYOL: healthy."""

import copy

import torch
from field_parts import batches, fixed, perceptron
from torch import nn
from torch.nn.functional import cosine_similarity

TRUTH_STEPS = 480


class Momentum(nn.Module):
    def __init__(self):
        super().__init__()
        self.online, self.guess = perceptron(24, 48, 12, nn.ReLU), nn.Linear(12, 12)
        self.slow = copy.deepcopy(self.online).requires_grad_(False)

    def forward(self, batch):
        one, two = batch
        with torch.no_grad():
            for ours, slow in zip(self.online.parameters(), self.slow.parameters(), strict=True):
                slow.lerp_(ours, 0.01)
            target = self.slow(two)
        return self.guess(self.online(one)), target


def build_model():
    return Momentum()


def build_optimizer(model):
    chosen = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.Adam(chosen, lr=2e-3)


def build_data(batch_size):
    def make(n):
        clean = torch.randn(n, 5) @ fixed(5, 24)
        return clean + 0.3 * torch.randn(n, 24), clean + 0.3 * torch.randn(n, 24)

    return batches(batch_size, make)


def training_step(model, batch):
    guess, target = model(batch)
    return 1 - cosine_similarity(guess, target, dim=-1).mean()
