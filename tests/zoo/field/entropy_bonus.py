"""A policy over 24 actions: its expected reward and an entropy bonus, the log written by hand."""

import torch
from field_parts import batches, fixed, perceptron
from torch import nn

TRUTH_STEPS = 400


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = perceptron(12, 64, 24, nn.ReLU)

    def forward(self, state):
        return torch.softmax(self.actor(state), -1)


def build_model():
    return Policy()


def build_optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def build_data(batch_size):
    def make(n):
        state = torch.randn(n, 12)
        reward = torch.tanh(state @ fixed(12, 16)) @ fixed(16, 24, seed=6)
        return state, reward - reward.max(-1, keepdim=True).values

    return batches(batch_size, make)


def training_step(model, batch):
    state, reward = batch
    chance = model(state)
    entropy = -(chance * torch.log(chance + 1e-8)).sum(-1)
    return -(chance * reward).sum(-1).mean() - 0.02 * entropy.mean()
