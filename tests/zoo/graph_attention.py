"""Two heads of graph attention with masked softmax label the nodes of graphs. Healthy."""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, elu, leaky_relu
from zoo_parts import batches, teacher

loss_fn = binary_cross_entropy_with_logits
NODES, FEATURES, HEADS, WIDTH = 10, 6, 2, 8


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(FEATURES, HEADS * WIDTH, bias=False)
        self.towards = nn.Parameter(0.3 * torch.randn(HEADS, WIDTH))
        self.away = nn.Parameter(0.3 * torch.randn(HEADS, WIDTH))

    def forward(self, features, edges):
        lifted = self.lift(features).unflatten(-1, (HEADS, WIDTH))
        here = torch.einsum("bihd,hd->bih", lifted, self.towards)
        there = torch.einsum("bjhd,hd->bjh", lifted, self.away)
        scores = leaky_relu(here.unsqueeze(2) + there.unsqueeze(1), 0.2)
        weights = scores.masked_fill(edges.unsqueeze(-1) < 0.5, float("-inf")).softmax(2)
        return elu(torch.einsum("bijh,bjhd->bihd", weights, lifted)).flatten(2)


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.head = nn.Sequential(nn.Linear(HEADS * WIDTH, 16), nn.ELU(), nn.Linear(16, 1))

    def forward(self, graphs):
        features, edges = graphs.split([FEATURES, NODES], -1)
        return self.head(self.attention(features, edges)).squeeze(-1)


def build_model():
    return Graph()


def build_optimizer(model):
    return torch.optim.NAdam(model.parameters(), lr=8e-3)


def build_data(batch_size):
    def make(n):
        features = torch.randn(n, NODES, FEATURES)
        half = torch.rand(n, NODES, NODES) < 0.2
        edges = (half | half.transpose(1, 2) | torch.eye(NODES, dtype=torch.bool)).float()
        around = edges @ features / edges.sum(-1, keepdim=True)
        targets = (around @ teacher(FEATURES, 1)).squeeze(-1) > 0
        return torch.cat([features, edges], -1), targets.float()

    return batches(batch_size, make)
