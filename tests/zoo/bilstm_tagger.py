"""A two-way LSTM over words and their letters tags words, padding ignored. Healthy."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from zoo_parts import adam, batches

WORDS, LETTERS, LENGTH, SPELLING, TAGS, IGNORED = 80, 26, 12, 5, 6, -100


def loss_fn(outputs, targets):
    return cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


class Spelling(nn.Module):
    def __init__(self):
        super().__init__()
        self.letters = nn.Embedding(LETTERS, 16)
        self.conv = nn.Conv1d(16, 32, 3, padding=1)

    def forward(self, letters):
        n, length, spelling = letters.shape
        read = self.letters(letters).view(n * length, spelling, 16).transpose(1, 2)
        return torch.relu(self.conv(read)).amax(-1).view(n, length, 32)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.spelling = nn.Embedding(WORDS, 32), Spelling()
        self.drop = nn.Dropout(0.1)
        self.lstm = nn.LSTM(64, 40, batch_first=True, bidirectional=True)
        self.norm = nn.LayerNorm(80)
        self.head = nn.Sequential(nn.Linear(80, 48), nn.ReLU(), nn.Linear(48, TAGS))

    def forward(self, inputs):
        words, letters = inputs
        read = self.drop(torch.cat([self.words(words), self.spelling(letters)], -1))
        return self.head(self.norm(self.lstm(read)[0]))


def build_model():
    return Tagger()


def build_optimizer(model):
    return adam(model, 4e-3)


def build_data(batch_size):
    def make(n):
        words = torch.randint(WORDS, (n, LENGTH))
        letters = torch.randint(LETTERS, (n, LENGTH, SPELLING))
        ending = (letters[..., -1] < 13).long()
        before = torch.roll(words, 1, 1)
        before[:, 0] = 0
        tags = (words % 3) + 3 * ((before % 2 + ending) % 2)
        empty = torch.arange(LENGTH) >= torch.randint(4, LENGTH + 1, (n, 1))
        return (words, letters), tags.masked_fill(empty, IGNORED)

    return batches(batch_size, make)
