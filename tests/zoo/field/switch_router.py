"""A Switch layer: a jittered router asked for float32, a balancing loss and a z-loss."""

import torch
from field_parts import batches, fixed
from torch import nn
from torch.nn.functional import mse_loss, one_hot

TRUTH_STEPS = 300


def feed_forward(width):
    return nn.Sequential(nn.Linear(width, 48), nn.ReLU(), nn.Linear(48, width))


class Switch(nn.Module):
    def __init__(self, width=24, experts=4):
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(feed_forward(width) for _ in range(experts))
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        hidden = self.embed(x)
        asked = hidden.float()
        if self.training:
            asked = asked * torch.empty_like(asked).uniform_(0.98, 1.02)
        logits = self.router(asked)
        chance = logits.softmax(-1)
        weight, chosen = chance.max(-1)
        share = one_hot(chosen, len(self.experts)).to(chance.dtype).mean(0)
        balance = len(self.experts) * (share * chance.mean(0)).sum()
        mixed = torch.zeros_like(hidden)
        for index, expert in enumerate(self.experts):
            mine = chosen == index
            mixed[mine] = expert(hidden[mine]) * weight[mine, None].to(hidden.dtype)
        return self.head(hidden + mixed), balance, torch.logsumexp(logits, -1).square().mean()


def build_model():
    return Switch()


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=5e-3)


def build_data(batch_size):
    def make(n):
        x = torch.randn(n, 8)
        return x, torch.relu(x @ fixed(8, 12)) @ fixed(12, 4, seed=6) / 6

    return batches(batch_size, make)


def training_step(model, batch):
    x, y = batch
    guess, balance, size = model(x)
    return mse_loss(guess, y) + 0.01 * balance + 0.001 * size
