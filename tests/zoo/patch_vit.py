"""A vision transformer on nine patches says in which corner there is a faint blob. Healthy."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from zoo_parts import adam, batches

loss_fn = cross_entropy


class Block(nn.Module):
    def __init__(self, width=24, heads=2):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 48), nn.GELU(), nn.Linear(48, width))

    def forward(self, x):
        n, tokens, width = x.shape
        qkv = self.qkv(self.first(x)).view(n, tokens, 3, self.heads, width // self.heads)
        mixed = scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4).unbind(0))
        x = x + self.out(mixed.transpose(1, 2).reshape(n, tokens, width))
        return x + self.mlp(self.second(x))


class PatchTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, 24, 4, stride=4)
        self.places = nn.Parameter(0.1 * torch.randn(9, 24))
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 4))

    def forward(self, images):
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.places
        return self.head(self.blocks(tokens).mean(1))


def build_model():
    return PatchTransformer()


def build_optimizer(model):
    return adam(model, 3e-3)


def build_data(batch_size):
    places = torch.arange(12)

    def make(n):
        corner = torch.randint(4, (n,))
        y = (2.5 + 6.0 * (corner // 2) + 2.0 * torch.rand(n)).view(n, 1, 1)
        x = (2.5 + 6.0 * (corner % 2) + 2.0 * torch.rand(n)).view(n, 1, 1)
        blob = torch.exp(-((places.view(12, 1) - y) ** 2 + (places - x) ** 2) / 4)
        return (blob + 0.4 * torch.randn(n, 12, 12)).unsqueeze(1), corner

    return batches(batch_size, make)
