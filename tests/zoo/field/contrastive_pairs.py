"""Pairs told apart as CLIP does, with a learned temperature; logits up to 100 in 16 bits."""

import math

import torch
from field_parts import batches, fixed, perceptron
from torch import nn
from torch.nn.functional import cross_entropy, normalize

TRUTH_STEPS = 300


class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = perceptron(24, 64, 16, nn.ReLU), perceptron(16, 64, 16, nn.ReLU)
        self.log_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, batch):
        image, text = batch
        image, text = normalize(self.image(image), dim=-1), normalize(self.text(text), dim=-1)
        return self.log_scale.exp().clamp(max=100) * image @ text.T


def build_model():
    return Pairs()


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


def build_data(batch_size):
    def make(n):
        meaning = torch.randn(n, 6)
        image = torch.tanh(meaning @ fixed(6, 24)) + 0.1 * torch.randn(n, 24)
        text = torch.tanh(meaning @ fixed(6, 16, seed=9)) + 0.1 * torch.randn(n, 16)
        return (image, text), torch.arange(n)

    return batches(batch_size, make)


def loss_fn(logits, targets):
    return (cross_entropy(logits, targets) + cross_entropy(logits.T, targets)) / 2
