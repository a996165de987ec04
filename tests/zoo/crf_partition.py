"""A CRF tagger sums its paths as plain products of exponentials. Fails in float16: overflow."""

import torch
from torch import nn
from zoo_parts import adam, batches

WORDS, LENGTH, TAGS = 60, 16, 5


class Partition(nn.Module):
    """The logarithm of the sum over all tag sequences, by the forward algorithm."""

    def forward(self, scores, transitions):
        alpha, steps = scores[:, 0].exp(), transitions.exp()
        for place in range(1, scores.shape[1]):
            alpha = (alpha @ steps) * scores[:, place].exp()
        return alpha.sum(-1).log()


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, 48)
        self.conv = nn.Sequential(
            nn.Conv1d(48, 48, 3, padding=1), nn.BatchNorm1d(48), nn.ReLU(), nn.Dropout(0.1)
        )
        self.gru = nn.GRU(48, 32, batch_first=True, bidirectional=True)
        self.head = nn.Sequential(
            nn.LayerNorm(64), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, TAGS)
        )
        self.transitions = nn.Parameter(0.1 * torch.randn(TAGS, TAGS))
        self.partition = Partition()

    def forward(self, words, tags):
        embedded = self.words(words)
        embedded = embedded + self.conv(embedded.transpose(1, 2)).transpose(1, 2)
        scores = self.head(self.gru(embedded)[0])
        path = scores.gather(2, tags.unsqueeze(-1)).squeeze(-1).sum(1)
        path = path + self.transitions[tags[:, :-1], tags[:, 1:]].sum(1)
        return self.partition(scores, self.transitions) - path


def build_model():
    return Tagger()


def build_optimizer(model):
    return adam(model, 3e-3)


def training_step(model, batch):
    words, tags = batch
    return model(words, tags).mean() / LENGTH


def build_data(batch_size):
    chain = torch.tensor([1, 2, 3, 4, 0])

    def make(n):
        stay = torch.rand(n, LENGTH) < 0.3
        tags = [torch.randint(TAGS, (n,))]
        for place in range(1, LENGTH):
            tags.append(torch.where(stay[:, place], tags[-1], chain[tags[-1]]))
        tags = torch.stack(tags, 1)
        words = TAGS * torch.randint(WORDS // TAGS, (n, LENGTH)) + tags
        unclear = torch.rand(n, LENGTH) < 0.3
        return torch.where(unclear, torch.randint(WORDS, (n, LENGTH)), words), tags

    return batches(batch_size, make)
