"""Learned latents read a set of tagged values by cross attention, as in Perceiver. Healthy."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from zoo_parts import adam, batches, teacher

loss_fn = cross_entropy
ITEMS, FEATURES, WIDTH = 40, 8, 48


def mlp(width):
    return nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
    )


class Attend(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.query_norm, self.memory_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = mlp(width)

    def forward(self, x, memory):
        memory = self.memory_norm(memory)
        x = x + self.attention(self.query_norm(x), memory, memory, need_weights=False)[0]
        return x + self.mlp(x)


class Perceiver(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(FEATURES, WIDTH)
        self.latents = nn.Parameter(0.2 * torch.randn(6, WIDTH))
        self.read = nn.ModuleList(Attend(WIDTH, 2) for _ in range(2))
        self.think = nn.ModuleList(Attend(WIDTH, 4) for _ in range(2))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4))

    def forward(self, items):
        memory = self.embed(items)
        latents = self.latents.expand(len(items), -1, -1)
        for read, think in zip(self.read, self.think, strict=True):
            latents = read(latents, memory)
            latents = think(latents, latents)
        return self.head(latents.mean(1))


def build_model():
    return Perceiver()


def build_optimizer(model):
    return adam(model, 2e-3)


def build_data(batch_size):
    centres = 1.2 * teacher(4, FEATURES, seed=31)

    def make(n):
        kind = torch.randint(4, (n,))
        relevant = (torch.rand(n, ITEMS, 1) < 0.3).float()
        items = torch.randn(n, ITEMS, FEATURES) + 2 * relevant * centres[kind].unsqueeze(1)
        return items, kind

    return batches(batch_size, make)
