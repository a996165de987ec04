"""Rotary attention at offsets up to 30000, sines made in float32 and cast, as in LLaMA: healthy."""

import torch
from field_parts import batches
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

TRUTH_STEPS = 300


def rotate(x, cosine, sine):
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine


class Rotary(nn.Module):
    def __init__(self, width=16, vocabulary=12):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.parts = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("rates", 10000.0 ** -(torch.arange(0, width, 2) / width))

    def forward(self, batch):
        tokens, places = batch
        q, k, v = self.parts(self.embed(tokens)).chunk(3, -1)
        angles = places[..., None].float() * self.rates
        angles = torch.cat([angles, angles], -1)
        cosine, sine = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
        q, k = rotate(q, cosine, sine), rotate(k, cosine, sine)
        return self.head(scaled_dot_product_attention(q, k, v)[:, -1])


def build_model():
    return Rotary()


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def build_data(batch_size):
    def make(n):
        tokens = torch.randint(12, (n, 10))
        places = torch.randint(30000, (n, 1)) + torch.arange(10)
        return (tokens, places), tokens[:, -3]

    return batches(batch_size, make)


loss_fn = cross_entropy
