"""Causal dilated convolutions as a character model of a second-order text. Healthy."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad
from zoo_parts import adam, batches

SYMBOLS, LENGTH = 10, 20


class Causal(nn.Module):
    def __init__(self, width, dilation):
        super().__init__()
        self.dilation = dilation
        self.conv = nn.Conv1d(width, 2 * width, 2, dilation=dilation)
        self.out = nn.Conv1d(width, width, 1)

    def forward(self, x):
        value, gate = self.conv(pad(x, (self.dilation, 0))).chunk(2, 1)
        return x + self.out(torch.tanh(value) * torch.sigmoid(gate))


class CharacterModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, 24)
        self.body = nn.Sequential(Causal(24, 1), Causal(24, 2))
        self.head = nn.Linear(24, SYMBOLS)

    def forward(self, text):
        return self.head(self.body(self.embed(text).transpose(1, 2)).transpose(1, 2))


def build_model():
    return CharacterModel()


def build_optimizer(model):
    return adam(model, 1e-2)


def loss_fn(outputs, targets):
    return cross_entropy(outputs.flatten(0, 1), targets.flatten())


def build_data(batch_size):
    fixed = torch.Generator().manual_seed(5)
    chances = torch.softmax(2.0 * torch.randn(SYMBOLS, SYMBOLS, SYMBOLS, generator=fixed), -1)

    def make(n):
        text = list(torch.randint(SYMBOLS, (2, n)))
        for _ in range(LENGTH - 1):
            text.append(torch.multinomial(chances[text[-2], text[-1]], 1).squeeze(1))
        text = torch.stack(text, 1)
        return text[:, :-1], text[:, 1:]

    return batches(batch_size, make)
