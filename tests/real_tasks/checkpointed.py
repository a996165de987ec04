"""Blocks whose activations are computed again in the backward pass, by both of torch's ways."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

BATCH_SIZE = 16
CLIP_GRAD_NORM = 1.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 32)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 32)
            )
            for _ in range(4)
        )
        self.last = nn.Linear(32, 4)

    def forward(self, x):
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            x = x + checkpoint(block, x, use_reentrant=index % 2 == 0)
        return self.last(x)


def build_model():
    return Net()


def build_data(batch_size):
    teacher = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    for _ in range(400):
        x = torch.randn(batch_size, 12)
        yield x, (x @ teacher).argmax(1)


def loss_fn(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=2e-3)
