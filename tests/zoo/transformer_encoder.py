"""PyTorch's own encoder layer with dropout: MultiheadAttention never calls its out_proj."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from zoo_parts import adam, batches

loss_fn = cross_entropy


def build_optimizer(model):
    return adam(model, 2e-3)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 16)
        self.places = nn.Parameter(0.1 * torch.randn(10, 16))
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 4)

    def forward(self, tokens):
        return self.head(self.layer(self.embed(tokens) + self.places).mean(1))


def build_model():
    return Encoder()


def build_data(batch_size):
    def make(n):
        tokens = torch.randint(0, 12, (n, 10))
        return tokens, (tokens < 4).sum(1).clamp(2, 5) - 2

    return batches(batch_size, make)
