"""A small BERT with dropout fills in masked words of sentences on four topics. Healthy."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from zoo_parts import batches

WORDS, LENGTH, MASK = 16, 10, 16


def loss_fn(outputs, targets):
    return cross_entropy(outputs.transpose(1, 2), targets, ignore_index=-100)


class Bert(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.words = nn.Embedding(WORDS + 1, width)
        self.places = nn.Embedding(LENGTH, width)
        self.norm = nn.LayerNorm(width)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, 4, 64, 0.1, "gelu", batch_first=True), 1
        )
        self.head = nn.Sequential(
            nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, WORDS)
        )
        for table in (self.words, self.places):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.encoder(self.norm(self.words(tokens) + self.places(places))))


def build_model():
    return Bert()


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)


def build_data(batch_size):
    generator = torch.Generator().manual_seed(5)
    sentences = torch.randint(WORDS, (4, LENGTH), generator=generator)

    def make(n):
        tokens = sentences[torch.randint(4, (n,))]
        stray = torch.rand(n, LENGTH) < 0.1
        tokens = torch.where(stray, torch.randint(WORDS, (n, LENGTH)), tokens)
        hidden = torch.rand(n, LENGTH) < 0.2
        hidden[:, 0] |= ~hidden.any(1)
        return tokens.masked_fill(hidden, MASK), tokens.masked_fill(~hidden, -100)

    return batches(batch_size, make)
