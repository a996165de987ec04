"""A small causal transformer with dropout."""

from __future__ import annotations

import sources
import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.places = nn.Embedding(20, 32), nn.Embedding(16, 32)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.1, batch_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 20)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        h = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.body(h, mask=mask, is_causal=True))


def build_model():
    return Model()


def build_data(batch_size):
    return sources.tokens(batch_size)


def loss_fn(outputs, targets):
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())
