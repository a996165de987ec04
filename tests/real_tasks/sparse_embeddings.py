"""A click model whose tables have sparse gradients: SGD when tuned, SparseAdam beside AdamW."""

import torch
from torch import nn

BATCH_SIZE = 32
WEIGHTS = torch.randn(3, 200, generator=torch.Generator().manual_seed(0))


class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(200, 8, sparse=True)
        self.items = nn.EmbeddingBag(200, 8, mode="mean", sparse=True)
        self.tower = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, inputs):
        rows = torch.cat([self.user(inputs["user"]), self.items(inputs["items"])], 1)
        return self.tower(rows).squeeze(1)


def build_model():
    return Clicks()


def build_data(batch_size):
    for _ in range(400):
        user, items = torch.randint(200, (batch_size,)), torch.randint(200, (batch_size, 3))
        score = WEIGHTS[0, user] + WEIGHTS[1:, items].sum((0, 2))
        yield {"user": user, "items": items}, (score > 0).float()


def loss_fn(outputs, targets):
    return nn.functional.binary_cross_entropy_with_logits(outputs, targets)


def build_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


def build_optimizers(model):
    tables = [model.user.weight, model.items.weight]
    return [
        torch.optim.SparseAdam(tables, lr=0.01),
        torch.optim.AdamW(model.tower.parameters(), lr=0.01),
    ]
