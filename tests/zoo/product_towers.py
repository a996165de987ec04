"""Two towers for queries and products, trained by in-batch softmax with a temperature. Healthy."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from zoo_parts import batches, teacher

WORDS, FEATURES = 120, 12


class QueryTower(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.words = nn.EmbeddingBag(WORDS, width, mode="mean")
        self.body = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 96), nn.GELU(), nn.Dropout(0.1)
        )
        self.out = nn.Linear(96, 32)

    def forward(self, words):
        return normalize(self.out(self.body(self.words(words))), dim=-1)


class ProductTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(FEATURES, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU()
        )
        self.out = nn.Linear(64, 32)

    def forward(self, features):
        return normalize(self.out(self.body(features)), dim=-1)


class Retrieval(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.product = QueryTower(), ProductTower()
        self.log_scale = nn.Parameter(torch.tensor(2.3))

    def forward(self, words, features):
        return self.log_scale.exp() * self.query(words) @ self.product(features).t()


def build_model():
    return Retrieval()


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=1e-3)


def training_step(model, batch):
    words, features = batch
    scores = model(words, features)
    places = torch.arange(len(scores), device=scores.device)
    return (cross_entropy(scores, places) + cross_entropy(scores.t(), places)) / 2


def build_data(batch_size):
    meaning = teacher(WORDS, FEATURES, seed=23) * WORDS**0.5

    def make(n):
        topic = torch.randint(WORDS // 6, (n, 1))
        words = 6 * topic + torch.randint(6, (n, 5))
        features = meaning[words].mean(1) + 0.2 * torch.randn(n, FEATURES)
        return words, features

    return batches(batch_size, make)
