"""A router takes the best two of eight experts: choices flip, training does not."""

import torch
from field_parts import batches, fixed, perceptron
from torch import nn
from torch.nn.functional import cross_entropy

TRUTH_STEPS = 300


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 8)
        self.experts = nn.ModuleList(perceptron(16, 16, 6, nn.ReLU) for _ in range(8))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        every = torch.stack([expert(x) for expert in self.experts], 1)
        taken = every.gather(1, chosen[..., None].expand(-1, -1, every.shape[-1]))
        return (weights[..., None] * taken).sum(1)


def build_model():
    return Routed()


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def build_data(batch_size):
    def make(n):
        x = torch.randn(n, 16)
        return x, (torch.tanh(x @ fixed(16, 24)) @ fixed(24, 6, seed=6)).argmax(-1)

    return batches(batch_size, make)


loss_fn = cross_entropy
