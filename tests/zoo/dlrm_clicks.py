"""A DLRM: embeddings, a bottom MLP, pairwise dot products and a top MLP predict clicks. Healthy."""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from zoo_parts import batches, teacher

loss_fn = binary_cross_entropy_with_logits
SIZES, DENSE, WIDTH = (40, 25, 60, 12, 30), 8, 32


class Interaction(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.register_buffer("pairs", torch.tril_indices(count, count, -1))

    def forward(self, vectors):
        products = vectors @ vectors.transpose(1, 2)
        return products[:, self.pairs[0], self.pairs[1]]


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, WIDTH) for size in SIZES)
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.2)
        self.bottom = nn.Sequential(
            nn.Linear(DENSE, 64), nn.ReLU(), nn.Linear(64, WIDTH), nn.ReLU()
        )
        self.interaction = Interaction(len(SIZES) + 1)
        pairs = len(SIZES) * (len(SIZES) + 1) // 2
        self.top = nn.Sequential(
            nn.Linear(WIDTH + pairs, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)
        )

    def forward(self, inputs):
        dense, sparse = inputs
        low = self.bottom(torch.log1p(dense))
        looked = [table(sparse[:, place]) for place, table in enumerate(self.tables)]
        crossed = self.interaction(torch.stack([low, *looked], 1))
        return self.top(torch.cat([low, crossed], 1)).squeeze(-1)


def build_model():
    return Recommender()


def build_optimizer(model):
    return torch.optim.Adagrad(model.parameters(), lr=3e-2)


def build_data(batch_size):
    tastes = [teacher(size, 1, seed=40 + size).squeeze(-1) * size**0.5 for size in SIZES]
    slopes = teacher(DENSE, 1, seed=17)

    def make(n):
        dense = torch.rand(n, DENSE).mul(4).exp() - 1
        sparse = torch.stack([torch.randint(size, (n,)) for size in SIZES], 1)
        logit = 2 * ((torch.log1p(dense) - 2) @ slopes).squeeze(-1)
        logit = logit + sum(taste[sparse[:, i]] for i, taste in enumerate(tastes))
        return (dense, sparse), (torch.rand(n) < torch.sigmoid(2 * logit)).float()

    return batches(batch_size, make)
