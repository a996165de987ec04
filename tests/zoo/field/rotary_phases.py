"""Rotary attention whose phases come from a matrix product of positions and inverse rates."""

import torch
from field_parts import batches
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

TRUTH_STEPS = 400


class Phases(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("inverse", 10000.0 ** -(torch.arange(0, width, 2) / width))

    def forward(self, x, places):
        angles = (self.inverse[None, :, None] @ places[:, None, :].float()).transpose(1, 2)
        angles = torch.cat([angles, angles], -1)[:, None]
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class Decoder(nn.Module):
    def __init__(self, vocabulary=16, width=32, heads=2):
        super().__init__()
        self.heads, self.phases = heads, Phases(width // heads)
        self.embed = nn.Embedding(vocabulary, width)
        self.parts, self.back = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, batch):
        tokens, places = batch
        x = self.embed(tokens)
        parts = self.parts(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        cosine, sine = self.phases(parts, places)
        q, k = (
            p * cosine + torch.cat([-p.chunk(2, -1)[1], p.chunk(2, -1)[0]], -1) * sine
            for p in parts[:2]
        )
        mixed = scaled_dot_product_attention(q, k, parts[2], is_causal=True)
        return self.head(x + self.back(mixed.transpose(1, 2).flatten(2)))[:, 4:].flatten(0, 1)


def build_model():
    return Decoder()


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def build_data(batch_size):
    def make(n):
        tokens = torch.randint(16, (n, 16))
        places = torch.randint(2000, (n, 1)) + torch.arange(16)
        return (tokens, places), tokens[:, 2:-2].flatten()

    return batches(batch_size, make)


loss_fn = cross_entropy
