"""A GRU translates short sentences word by word with additive attention. Healthy."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from zoo_parts import adam, batches

WORDS, LENGTH, START = 10, 8, 10


def loss_fn(outputs, targets):
    return cross_entropy(outputs.flatten(0, 1), targets.flatten())


class Translator(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.source = nn.Embedding(WORDS, width)
        self.target = nn.Embedding(WORDS + 1, width)
        self.encoder = nn.GRU(width, width, batch_first=True)
        self.decoder = nn.GRU(width, width, batch_first=True)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width, bias=False)
        self.energy = nn.Linear(width, 1, bias=False)
        self.out = nn.Linear(2 * width, WORDS)

    def forward(self, tokens):
        """Take the source's words and, after them, the target's words up to the last but one."""
        memory, state = self.encoder(self.source(tokens[:, :LENGTH]))
        states, _ = self.decoder(self.target(tokens[:, LENGTH:]), state)
        mixed = torch.tanh(self.query(states).unsqueeze(2) + self.key(memory).unsqueeze(1))
        weights = self.energy(mixed).squeeze(-1).softmax(-1)
        return self.out(torch.cat([states, weights @ memory], -1))


def build_model():
    return Translator()


def build_optimizer(model):
    return adam(model, 5e-3)


def build_data(batch_size):
    dictionary = torch.tensor([7, 2, 9, 0, 4, 8, 1, 3, 6, 5])

    def make(n):
        steps = torch.randint(1, 3, (n, LENGTH))
        steps[:, 0] = torch.randint(WORDS, (n,))
        source = steps.cumsum(1) % WORDS
        target = dictionary[source]
        start = torch.full((n, 1), START)
        return torch.cat([source, start, target[:, :-1]], 1), target

    return batches(batch_size, make)
