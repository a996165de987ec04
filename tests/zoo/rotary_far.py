"""Rotary attention over far positions, the angles from a matrix product. Silent in bfloat16."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from zoo_parts import adam, batches

loss_fn = cross_entropy


class Rotary(nn.Module):
    def __init__(self, half):
        super().__init__()
        self.register_buffer("rates", torch.exp(-0.8 * torch.arange(float(half))))

    def forward(self, x, places):
        angles = (places[:, :, None] @ self.rates[None, :]).unsqueeze(1)
        first, second = x.chunk(2, -1)
        cosine, sine = angles.cos(), angles.sin()
        return torch.cat([first * cosine - second * sine, first * sine + second * cosine], -1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 16)
        self.ask, self.key, self.value = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.rotary = Rotary(8)
        self.head = nn.Linear(16, 8)

    def forward(self, batch):
        tokens, places = batch
        x = self.embed(tokens)
        q = self.rotary(self.ask(x).unsqueeze(1), places)
        k = self.rotary(self.key(x).unsqueeze(1), places)
        mixed = scaled_dot_product_attention(
            q.float(), k.float(), self.value(x).unsqueeze(1).float()
        )
        return self.head(mixed.squeeze(1)[:, -1])


def build_model():
    return Attention()


def build_optimizer(model):
    return adam(model, 1e-2)


def build_data(batch_size):
    def make(n):
        tokens = torch.randint(0, 8, (n, 8))
        places = torch.randint(0, 20000, (n, 1)) + torch.arange(8)
        return (tokens, places.float()), tokens[:, -2]

    return batches(batch_size, make)
