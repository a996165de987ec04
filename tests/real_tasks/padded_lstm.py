"""An LSTM that packs padded sequences itself, by lengths that must be on the CPU."""

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

BATCH_SIZE = 16


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(24, 16, padding_idx=0)
        self.lstm = nn.LSTM(16, 24, batch_first=True)
        self.head = nn.Linear(24, 2)

    def forward(self, words, lengths):
        rows = self.words(words)
        packed = pack_padded_sequence(rows, lengths.cpu(), batch_first=True, enforce_sorted=False)
        hidden, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        means = hidden.sum(1) / lengths[:, None]
        return self.head(means)


def build_model():
    return Classifier()


def build_data(batch_size):
    for _ in range(400):
        lengths = torch.randint(4, 12, (batch_size,))
        words = torch.randint(1, 24, (batch_size, 12)) * (torch.arange(12) < lengths[:, None])
        yield {"words": words, "lengths": lengths, "labels": (words > 12).sum(1) * 2 > lengths}


def training_step(model, batch):
    logits = model(batch["words"], batch["lengths"])
    return nn.functional.cross_entropy(logits, batch["labels"].long())


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=5e-3)
