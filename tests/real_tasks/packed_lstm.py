"""A bidirectional LSTM that tags packed sequences; its inputs, outputs and targets are packed."""

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

BATCH_SIZE = 16
CLIP_GRAD_NORM = 1.0


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(24, 16)
        self.lstm = nn.LSTM(16, 24, num_layers=2, bidirectional=True)
        self.head = nn.Linear(48, 4)

    def forward(self, packed):
        hidden, _ = self.lstm(packed._replace(data=self.words(packed.data)))
        return PackedSequence(self.head(hidden.data), *hidden[1:])


def build_model():
    return Tagger()


def build_data(batch_size):
    for _ in range(400):
        lengths = torch.randint(4, 12, (batch_size,)).tolist()
        texts = [torch.randint(24, (length,)) for length in lengths]
        tags = [(text + text.roll(1)) % 4 for text in texts]
        yield pack_sequence(texts, False), pack_sequence(tags, False)


def loss_fn(outputs, targets):
    return nn.functional.cross_entropy(outputs.data, targets.data)


def build_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=5e-3)
