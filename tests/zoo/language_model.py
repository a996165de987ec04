"""A causal transformer on characters, its head tied to the embedding, gradients clipped."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from zoo_parts import adam, batches

CLIP_GRAD_NORM = 1.0


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.feed = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        n, t, c = x.shape
        parts = self.attend(self.first(x)).view(n, t, 3, self.heads, c // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(n, t, c))
        return x + self.feed(self.second(x))


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 24)
        self.blocks = nn.Sequential(Block(24, 2), Block(24, 2))
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.norm(self.blocks(self.embed(tokens))))


def build_model():
    return Language()


def loss_fn(outputs, targets):
    return cross_entropy(outputs.flatten(0, 1), targets.flatten())


def build_optimizer(model):
    return adam(model, 3e-3)


def build_data(batch_size):
    def make(n):
        start = torch.randint(0, 20, (n, 1))
        step = torch.randint(1, 4, (n, 1))
        tokens = (start + step * torch.arange(13)) % 20
        return tokens[:, :-1], tokens[:, 1:]

    return batches(batch_size, make)
