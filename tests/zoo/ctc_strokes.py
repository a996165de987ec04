"""Letters are read from frames with CTC, through a strided convolution and a GRU. Healthy."""

import torch
from torch import nn
from torch.nn.functional import ctc_loss
from zoo_parts import batches, teacher

LETTERS, SPELT, EACH = 5, 4, 6


def loss_fn(outputs, targets):
    scores = outputs.log_softmax(-1).transpose(0, 1)
    steps, n = scores.shape[:2]
    return ctc_loss(scores, targets, torch.full((n,), steps), torch.full((n,), SPELT))


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(6, 24, 3, stride=2, padding=1), nn.GELU())
        self.gru = nn.GRU(24, 24, batch_first=True, bidirectional=True)
        self.out = nn.Linear(48, LETTERS + 1)

    def forward(self, frames):
        hidden = self.conv(frames.transpose(1, 2)).transpose(1, 2)
        return self.out(self.gru(hidden)[0])


def build_model():
    return Reader()


def build_optimizer(model):
    return torch.optim.RMSprop(model.parameters(), lr=3e-3)


def build_data(batch_size):
    shapes = 3 * teacher(LETTERS, EACH - 1, 6, seed=31)

    def make(n):
        text = torch.randint(LETTERS, (n, SPELT))
        frames = torch.zeros(n, SPELT, EACH, 6)
        frames[:, :, : EACH - 1] = shapes[text]
        return frames.flatten(1, 2) + 0.2 * torch.randn(n, SPELT * EACH, 6), text + 1

    return batches(batch_size, make)
